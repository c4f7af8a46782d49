"""Training speed on a CPU that is shared: two trainings at once, and one beside a busy process.

    python benchmarks/shared_machine.py [--recipe NAME] [--seconds S] [--rounds N] [--cores N] [--json FILE]

All processes share the same N cores (default: 2). Each training is recipe quickstart for S seconds of
training. Speeds are tokens per second over the whole training, and medians over the rounds; a round measures
all cases in turn. Run it on a machine that does nothing else. Variables such as OMP_WAIT_POLICY and
GOMP_SPINCOUNT reach the trainings, so that settings can be compared:

    GOMP_SPINCOUNT=300000 python benchmarks/shared_machine.py    # threads spin, as OpenMP does by default
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REQUIRED = {"two at once": 0.40, "beside a busy process": 0.45}
"""The least speed, as a share of the speed alone."""

SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--seconds", type=float, default=20.0, help="of every training")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)  # inherited by all processes below
    with tempfile.TemporaryDirectory(prefix="longspan-") as folder:
        trainings = _Trainings(Path(folder), args.recipe)
        trainings.run(1, seconds=1.0)  # prepares the corpus and compiles
        rounds = [_round(trainings, args.seconds) for _ in range(args.rounds)]
    report = {
        "recipe": args.recipe,
        "seconds": args.seconds,
        "cores": len(cores),
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        **summary(rounds),
    }
    print(table(report["cases"]))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def _round(trainings: _Trainings, seconds: float) -> dict[str, list[float]]:
    """Tokens per second of every training, by case."""
    speeds = {"alone": trainings.run(1, seconds), "two at once": trainings.run(2, seconds)}
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        speeds["beside a busy process"] = trainings.run(1, seconds)
    finally:
        busy.kill()
        busy.wait()
    print({case: [round(speed) for speed in found] for case, found in speeds.items()}, file=sys.stderr)
    return speeds


class _Trainings:
    def __init__(self, folder: Path, recipe: str) -> None:
        self._folder, self._recipe, self._number = folder, recipe, 0
        self._environment = {**os.environ, "LONGSPAN_HOME": str(folder / "home")}

    def run(self, together: int, seconds: float) -> list[float]:
        """The tokens per second of so many trainings at once."""
        runs = []
        for _ in range(together):
            self._number += 1
            runs.append(self._folder / str(self._number))
        processes = [
            subprocess.Popen(self._command(run, seconds), env=self._environment, stdout=subprocess.DEVNULL)
            for run in runs
        ]
        statuses = [process.wait() for process in processes]
        if any(statuses):
            raise SystemExit("a training failed")
        return [speed((run / "metrics.jsonl").read_text().splitlines()) for run in runs]

    def _command(self, run: Path, seconds: float) -> list[str]:
        options = {
            "stage.0.steps": 1_000_000,
            "stage.0.max-seconds": seconds,
            "training.device": "cpu",
            "training.log-every": 1,
            "evaluation.max-tokens": 2048,
            "evaluation.max-tokens-final": 2048,
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        return [sys.executable, "-m", "longspan", "train", self._recipe, "--out", str(run), *words]


def speed(lines: Sequence[str]) -> float:
    """Tokens per second of training, from the lines of metrics.jsonl."""
    last = [line for line in map(json.loads, lines) if line["kind"] == "train"][-1]
    return float(last["tokens"] / last["seconds"])


def summary(rounds: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Medians over the rounds. Of trainings at once the slowest counts, as a share of the speed alone."""
    alone = statistics.median(one["alone"][0] for one in rounds)
    cases = []
    for case in rounds[0]:
        slowest = statistics.median(min(one[case]) for one in rounds)
        required = REQUIRED.get(case)
        share = slowest / alone
        cases.append(
            {
                "case": case,
                "tokens_per_second": slowest,
                "share": share,
                "required": required,
                "reached": required is None or share >= required,
            }
        )
    return {"cases": cases, "rounds": [dict(one) for one in rounds]}


def table(cases: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| case | tokens/s | of alone | required |", "|---|---|---|---|"]
    for one in cases:
        required = "" if one["required"] is None else f"{one['required']:.0%}"
        missed = "" if one["reached"] else " (missed)"
        lines.append(
            f"| {one['case']} | {one['tokens_per_second']:,.0f} | {one['share']:.0%}{missed} | {required} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
