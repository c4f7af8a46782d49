"""Measures the training speed of recipes with their default options, in the real training loop.

    python benchmarks/recipe_speed.py enwik8 txl-enwik8 ... --data TEXT [--seconds 20] [--json FILE]

Every recipe is trained by `longspan train RECIPE --data TEXT` in a separate process. The text is read as
bytes. Other options are the dotted ones given after the recipes, written with "=". The run is stopped when it
has logged for `--seconds` after its warm-up. A logged line has the speed over the steps since the previous
line: steps run back to back, and evaluations are not counted. The median of the lines after the warm-up, in
which code is compiled, is reported. Prints one JSON line per recipe.

Needs what `longspan train` imports: torch, triton, numpy, safetensors, tomli-w, rich, tensorboard, pooch, and
for recipes with word or subword tokenizers sentencepiece or tokenizers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Any text will do: recipes of the originals prepare only their own corpora.
BYTES = ["--data.tokenizer.kind=byte", "--data.tokenizer.order=frequency"]


def main(argv: Sequence[str] | None = None) -> int:
    args, dotted = _parser().parse_known_args(argv)
    wrong = [word for word in dotted if not word.startswith("--") or "." not in word or "=" not in word]
    if wrong:
        raise SystemExit(f"recipe_speed: '{wrong[0]}' is not an option: options look like --training.seed=2")
    if not args.data.exists():
        raise SystemExit(f"recipe_speed: there is no file or folder {args.data}")
    if args.json is not None and args.json.exists():
        raise SystemExit(f"recipe_speed: {args.json} exists already")
    failed = False
    for recipe in args.recipes:
        found = measured(recipe, dotted, args)
        failed |= "error" in found
        line = json.dumps(found)
        print(line, flush=True)
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            with args.json.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
    return int(failed)


def measured(recipe: str, dotted: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Train, watch the metrics, stop the run, and return its speed."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory(prefix="longspan-speed-") as place:
        run, log = Path(place) / "run", Path(place) / "log"
        command = [sys.executable, "-m", "longspan", "train", recipe, "--data", str(args.data), *BYTES]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, "--out", str(run), *dotted],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            )
            try:
                began = time.monotonic()
                _wait(process, run / "metrics.jsonl", args)
            finally:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        lines = _lines(run / "metrics.jsonl")
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    counted = [line["tokens_per_second"] for line in lines[args.warm_up :]]
    result: dict[str, Any] = {"recipe": recipe, "options": dotted, "lines": len(counted)}
    result["summary"] = next((line for line in said if " parameters, " in line), "").partition(
        ", run folder"
    )[0]
    result["warnings"] = [line for line in said if "Warning: " in line]
    if not counted:
        return result | {"error": said[-1] if said else "nothing was logged"}
    return result | {
        "tokens_per_second": statistics.median(counted),
        "slowest": min(counted),
        "fastest": max(counted),
        "steps": lines[-1]["step"],
        "training_seconds": lines[-1]["seconds"],
        "wall_seconds": time.monotonic() - began,
        "last_loss": lines[-1]["loss"],
        "span_mean": lines[-1].get("span_mean"),
    }


def _wait(process: subprocess.Popen[bytes], metrics: Path, args: argparse.Namespace) -> None:
    """Wait until enough is logged after the warm-up, the run ends, or `--patience` is over."""
    deadline = time.monotonic() + args.patience
    while process.poll() is None and time.monotonic() < deadline:
        lines = _lines(metrics)
        after = lines[args.warm_up :]
        if len(after) > 2 and after[-1]["seconds"] - after[0]["seconds"] >= args.seconds:
            return
        time.sleep(0.2)


def _lines(metrics: Path) -> list[dict[str, Any]]:
    """The complete lines of training metrics so far."""
    if not metrics.is_file():
        return []
    text = metrics.read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="names or TOML files")
    parser.add_argument("--data", type=Path, required=True, help="a text file or a folder")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="seconds of training to measure (default: 20)"
    )
    parser.add_argument("--warm-up", type=int, default=2, help="logged lines to skip (default: 2)")
    parser.add_argument(
        "--patience", type=float, default=240.0, help="most seconds per recipe (default: 240)"
    )
    parser.add_argument("--json", type=Path, help="also write the lines to a new file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
