"""What torchrun costs on one GPU: training speed with and without it, side by side.

    python benchmarks/one_rank.py RECIPE ... --data FILE [--steps N] [--rounds N] [--ways WAY ...]
                                  [--json FILE]

Each round trains every recipe in three ways: as a plain command, as one rank of torchrun (NCCL, gradients
averaged over one rank, steps captured as CUDA graphs), and as one rank with `training.shard`. The speed is
the median of the logged tokens per second after the first third of the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
WAYS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "plain": ((), ()),
    "torchrun": (TORCHRUN, ()),
    "torchrun, shard": (TORCHRUN, ("--training.shard", "true")),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="+")
    parser.add_argument("--data", required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    speeds: dict[str, dict[str, list[float]]] = {
        recipe: {way: [] for way in args.ways} for recipe in args.recipe
    }
    with tempfile.TemporaryDirectory(prefix="longspan-") as folder:
        for number in range(args.rounds):
            for recipe in args.recipe:
                for way in args.ways:
                    out = Path(folder) / f"{recipe}-{way.replace(', ', '-')}-{number}"
                    speeds[recipe][way].append(_speed(recipe, way, out, args))
                    print(f"{recipe}, {way}: {speeds[recipe][way][-1]:,.0f} tokens/s", flush=True)
    report = summary(speeds)
    print(json.dumps(report, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def summary(speeds: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """The best speed of each way, and its share of the plain command's."""
    return {
        recipe: {
            way: {
                "tokens_per_second": [round(speed) for speed in measured],
                "share_of_plain": round(max(measured) / max(ways["plain"]), 4),
            }
            for way, measured in ways.items()
        }
        for recipe, ways in speeds.items()
    }


def _speed(recipe: str, way: str, out: Path, args: argparse.Namespace) -> float:
    launcher, options = WAYS[way]
    words = ["-m", "longspan", "train", recipe, "--data", args.data, "--out", str(out), "--quiet"]
    options = [
        *("--stage.0.steps", str(args.steps), "--training.log_every", "25"),
        *("--training.evaluate_every", "0", "--training.checkpoint_every", "0"),
        *("--evaluation.max_tokens", "65536", "--evaluation.max_tokens_final", "65536"),
        *options,
    ]
    subprocess.run([sys.executable, *launcher, *words, *options], check=True)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steady = [line for line in lines if line["kind"] == "train" and line["step"] > args.steps / 3]
    return statistics.median(line["tokens_per_second"] for line in steady)


if __name__ == "__main__":
    main()
