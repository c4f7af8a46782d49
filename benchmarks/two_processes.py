"""Training speed of two processes on two cores against one process on one core, with the same batch.

    python benchmarks/two_processes.py [--recipe NAME] [--seconds S] [--rounds N] [--json FILE]
                                       [--OPTION VALUE ...]

Each process has one thread and a core of its own (`taskset`). A round measures one process, two with DDP, and
two with FSDP2, one after the other, for S seconds of training each. Speeds are tokens per second over the
whole training. The best round of a case counts: other work on the machine only makes it slower. Dotted
options change the recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared_machine import speed

AIM = 1.7
CASES: Mapping[str, tuple[int, bool]] = {
    "one process": (1, False),
    "two processes, DDP": (2, False),
    "two processes, FSDP2": (2, True),
}
"""The number of processes, and `training.shard`."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--seconds", type=float, default=20.0, help="of every training")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args, options = parser.parse_known_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("two cores are needed")
    speeds: dict[str, list[float]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory(prefix="longspan-") as folder:
        train(
            Path(folder) / "first", args.recipe, 1.0, cores, 1, False, options
        )  # prepares the corpus, compiles
        for number in range(args.rounds):
            for case, (processes, shard) in CASES.items():
                run = Path(folder) / f"{number}-{processes}-{shard}"
                speeds[case].append(train(run, args.recipe, args.seconds, cores, processes, shard, options))
                print(f"{case}: {speeds[case][-1]:,.0f} tokens/s", file=sys.stderr)
    print(table(speeds))
    if args.json is not None:
        report = {"recipe": args.recipe, "options": options, "seconds": args.seconds, "speeds": speeds}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def train(
    run: Path,
    recipe: str,
    seconds: float,
    cores: Sequence[int],
    processes: int,
    shard: bool,
    options: Sequence[str],
) -> float:
    """The tokens per second of a training."""
    changes = {
        "stage.0.steps": 1_000_000,
        "stage.0.max-seconds": seconds,
        "training.device": "cpu",
        "training.shard": str(shard).lower(),
        "training.checkpoint-every": 0,
        "evaluation.max-tokens": 2048,
        "evaluation.max-tokens-final": 2048,
    }
    words = [f"--{name}={value}" for name, value in changes.items()]
    longspan = [
        sys.executable,
        "-m",
        "longspan",
        "train",
        recipe,
        "--out",
        str(run),
        "--quiet",
        *words,
        *options,
    ]
    if processes == 1:
        command = ["taskset", "--cpu-list", str(cores[0]), *longspan]
    else:
        own_core = (
            f'set -- {cores[0]} {cores[1]} "$@"; shift "$LOCAL_RANK"; core=$1; shift $((2 - LOCAL_RANK)); '
        )
        pinned = ["sh", "-c", f'{own_core}exec taskset --cpu-list "$core" "$@"', "sh", *longspan]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [*torchrun, "--no-python", *pinned]
    environment = {**os.environ, "LONGSPAN_HOME": str(run.parent / "home"), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return speed((run / "metrics.jsonl").read_text().splitlines())


def table(speeds: Mapping[str, Sequence[float]]) -> str:
    one = max(speeds["one process"])
    lines = ["| case | tokens/s | of one process | aim |", "|---|---|---|---|"]
    for case, found in speeds.items():
        aim = f"{AIM}" if case == "two processes, DDP" else ""
        lines.append(f"| {case} | {max(found):,.0f} | {max(found) / one:.2f} | {aim} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
