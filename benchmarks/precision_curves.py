"""Compares learning curves in bf16 with torch.compile to those in float32 without it.

    python benchmarks/precision_curves.py --data TEXT --out FOLDER [--models NAME ...] [--steps 2000]

Adaptive span, all-attention, Transformer-XL and SHA-RNN are each trained twice by `longspan train`, on the
same bytes with the same seed: in float32 without torch.compile, and with the default "auto", which on a GPU
is bf16 and compiled. The models are those of recipes. Batches, blocks and warm-up are smaller, and equal for
both. `FOLDER` gets metrics.jsonl (every line of every run), results.json (results, configurations,
environments), table.md and, if matplotlib is installed, curves.png; `--draw FOLDER` draws them later.

`--smoke` makes the models tiny, to test this script on a CPU.
Needs what `longspan train` imports: torch, triton, numpy, safetensors, tomli-w, rich, tensorboard, pooch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {
    "float32": ["--training.precision", "float32", "--training.compile", "false"],
    "auto": ["--training.precision", "auto", "--training.compile", "auto"],
}
# The published warm-up of Adagrad is longer than these runs: here it is shorter, with a lower peak rate.
MODELS: dict[str, dict[str, Any]] = {
    "adaptive-span": {"recipe": "enwik8-small", "learning_rate": 0.02},
    "all-attention": {"recipe": "enwik8-pers-small", "learning_rate": 0.02},
    "transformer-xl": {"recipe": "txl-enwik8", "learning_rate": 2.5e-4},
    "sha-rnn": {"recipe": "sha-rnn-one", "learning_rate": 2e-3},
}
BATCH, BLOCK, EVALUATIONS, VALID_TOKENS = 8, 128, 10, 65_536
SMALL = {"num_layers": 2, "width": 32, "inner_width": 48, "num_heads": 2, "head_width": 16}
SMALL |= {"num_persistent": 8, "memory_length": 16}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    if args.draw is not None:
        draw(args.draw)
        return 0
    if args.data is None or args.out is None:
        raise SystemExit("precision_curves: give --data and --out")
    if not args.data.exists():
        raise SystemExit(f"precision_curves: there is no file or folder {args.data}")
    if args.out.exists() and any(args.out.iterdir()):
        raise SystemExit(f"precision_curves: {args.out} is not empty: give another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    pairs = [(model, setting) for model in args.models for setting in SETTINGS]
    with (
        tempfile.TemporaryDirectory(prefix="longspan-curves-") as place,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        runs = []
        for done in as_completed([pool.submit(train, *pair, Path(place), args) for pair in pairs]):
            runs.append(done.result())
            _write_metrics(runs[-1], args.out / "metrics.jsonl")  # kept, whatever happens to the other runs
    (args.out / "results.json").write_text(json.dumps(runs, indent=2) + "\n", encoding="utf-8")
    table = _table(runs, args.models)
    (args.out / "table.md").write_text(table + "\n", encoding="utf-8")
    print(table)
    draw(args.out)
    return int(any("error" in run for run in runs))


def _write_metrics(run: dict[str, Any], path: Path) -> None:
    with path.open("a", encoding="utf-8") as file:
        for line in run.pop("metrics"):
            file.write(json.dumps({"model": run["model"], "setting": run["setting"], **line}) + "\n")


def recipe_of(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """The recipe with one short stage."""
    from longspan import recipes

    table = recipes.load(MODELS[model]["recipe"])
    stage = table["stage"][0] | {"steps": args.steps, "learning_rate": MODELS[model]["learning_rate"]}
    if "warmup_steps" in stage:
        stage["warmup_steps"] = max(1, args.steps // 4)
    every = max(1, args.steps // EVALUATIONS)
    training = table["training"] | {"batch_size": BATCH, "block_length": BLOCK, "checkpoint_every": 0}
    training |= {"evaluate_every": every, "log_every": max(1, every // 4), "seed": args.seed}
    evaluation = {"protocol": "every-token", "batch_size": 8, "max_tokens": VALID_TOKENS}
    table |= {"name": model, "data": {"corpus": str(args.data)}, "training": training, "stage": [stage]}
    table |= {"evaluation": evaluation | {"max_tokens_final": VALID_TOKENS}, "expected": {}}
    if args.smoke:
        table["model"] |= {name: value for name, value in SMALL.items() if name in table["model"]}
        if "span" in table["model"]:
            table["model"]["span"]["limit"] = 64
        table["training"] |= {"batch_size": 2, "block_length": 16}
        table["evaluation"] |= {"max_tokens": 512, "max_tokens_final": 512}
    return table


def train(model: str, setting: str, place: Path, args: argparse.Namespace) -> dict[str, Any]:
    from longspan.config.schema import format_toml

    name = f"{model}-{setting}"
    recipe, run = place / f"{name}.toml", place / name
    recipe.write_text(format_toml(recipe_of(model, args)), encoding="utf-8")
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "longspan", "train", str(recipe), "--out", str(run), *SETTINGS[setting]],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    said = (done.stdout + done.stderr).splitlines()
    found: dict[str, Any] = {"model": model, "setting": setting, "recipe": MODELS[model]["recipe"]}
    found["summary"] = next((line for line in said if " parameters, " in line), "").partition(", run folder")[
        0
    ]
    found["warnings"] = [line for line in said if "Warning: " in line]
    found["metrics"] = _metrics(run)
    if done.returncode:
        found["error"] = said[-1] if said else f"status {done.returncode}"
        print(f"{name}: {found['error']}", file=sys.stderr, flush=True)
        return found
    valid = [line for line in found["metrics"] if line["kind"] == "valid"]
    train_lines = [line for line in found["metrics"] if line["kind"] == "train"]
    found |= {
        "steps": valid[-1]["step"],
        "valid_bits_per_byte": valid[-1]["bits_per_byte"],
        "train_seconds": train_lines[-1]["seconds"],
        "config": (run / "config.toml").read_text(encoding="utf-8"),
        "environment": json.loads((run / "environment.json").read_text(encoding="utf-8")),
    }
    print(f"{name}: {found['valid_bits_per_byte']:.4f} bits per byte; {found['summary']}", flush=True)
    return found


def _metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines()]


def _table(runs: list[dict[str, Any]], models: Sequence[str]) -> str:
    by_pair = {(run["model"], run["setting"]): run for run in runs}
    lines = ["| model | steps | float32 | auto | auto - float32 |", "|---|---|---|---|---|"]
    for model in models:
        exact, fast = (by_pair[model, setting] for setting in SETTINGS)
        if "error" in exact or "error" in fast:
            lines.append(f"| {model} | failed | {exact.get('error', '')} | {fast.get('error', '')} | |")
            continue
        a, b = exact["valid_bits_per_byte"], fast["valid_bits_per_byte"]
        lines.append(f"| {model} | {exact['steps']:,} | {a:.4f} | {b:.4f} | {b - a:+.4f} |")
    return "\n".join(["Bits per byte of the validation split after the last step.", "", *lines])


def draw(folder: Path) -> None:
    """Draw both curves of every model from metrics.jsonl."""
    try:
        import matplotlib
    except ImportError:
        print(f"matplotlib is not installed: draw later with --draw {folder}", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    models = list(dict.fromkeys(line["model"] for line in lines))
    figure, axes = pyplot.subplots(1, len(models), figsize=(3.6 * len(models), 3.2), squeeze=False)
    for model, axis in zip(models, axes[0], strict=True):
        for setting, style in zip(SETTINGS, ("-", "--"), strict=True):
            curve = [line for line in lines if (line["model"], line["setting"]) == (model, setting)]
            valid = [line for line in curve if line["kind"] == "valid"]
            label = "float32" if setting == "float32" else "auto (bf16, compiled)"
            steps, bits = [line["step"] for line in valid], [line["bits_per_byte"] for line in valid]
            axis.plot(steps, bits, style, marker=".", label=label)
        axis.set_title(model)
        axis.set_xlabel("step")
    axes[0][0].set_ylabel("bits per byte, validation")
    axes[0][-1].legend()
    figure.tight_layout()
    figure.savefig(folder / "curves.png", dpi=120)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", type=Path, help="a text file or a folder")
    parser.add_argument("--out", type=Path, help="a new folder for the results")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=4, help="runs in parallel on the GPU (default: 4)")
    parser.add_argument("--smoke", action="store_true", help="tiny models, to test this script on a CPU")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="only draw the curves of earlier results")
    return parser


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))
    sys.exit(main())
