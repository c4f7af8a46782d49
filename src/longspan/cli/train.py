"""`longspan train`: from a recipe to a trained model."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan import recipes
from longspan.cli import spans
from longspan.cli.figures import lost_text
from longspan.cli.overrides import apply, split_overrides
from longspan.config import RunConfig
from longspan.config.reference import documented
from longspan.config.schema import override, read
from longspan.errors import UserError

if TYPE_CHECKING:
    from longspan.runs import RunFolder

SAMPLE_TOKENS = 300
SCORED = ("valid", "test")


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model from a recipe",
        usage="longspan train [RECIPE] [--data CORPUS] [--name NAME] [--out RUN] [--OPTION VALUE ...]\n"
        "       longspan train --resume RUN",
        description="Train a model, score it on held-out text and show what it learned.",
        epilog="\n".join(["options of a recipe:", *_option_lines()]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help=f"a name from 'longspan recipes' or a TOML file (default: {recipes.DEFAULT})",
    )
    parser.add_argument("--data", metavar="CORPUS", help="a named corpus, a text file or a folder")
    parser.add_argument("--name", help="name of the run (default: that of --out, else the recipe's)")
    parser.add_argument("--out", metavar="RUN", help="the new run folder (default: runs/ and the name)")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run that was stopped")
    parser.set_defaults(run=run, accepts_overrides=True)


def run(args: argparse.Namespace) -> None:
    if args.resume is None:
        config = _configuration(args)
        out = Path(args.out) if args.out else _free_folder(Path("runs") / config.name)
    else:
        if args.recipe or args.data or args.name or args.out or args.overrides:
            raise UserError("--resume goes on with the settings of the run: leave out all other options")
        config, out = None, Path(args.resume)
    _train(config, out)


def _configuration(args: argparse.Namespace) -> RunConfig:
    table = recipes.load(args.recipe or recipes.DEFAULT)
    if args.data is not None:
        override(table, "data.corpus", args.data)
    if args.name is not None:
        override(table, "name", args.name)
    elif args.out is not None:
        override(table, "name", os.path.basename(os.path.abspath(args.out)))
    apply(table, split_overrides(args.overrides))
    return read(RunConfig, table)


def _free_folder(wanted: Path) -> Path:
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([wanted], numbered) if not path.exists())


def _train(config: RunConfig | None, out: Path) -> None:
    from longspan.runs import RunFolder
    from longspan.training import Interrupted, reporter_for_stdout, resume, train

    was_finished = config is None and RunFolder.open(out).final() is not None
    reporter = reporter_for_stdout()
    try:
        folder = resume(out, reporter=reporter) if config is None else train(config, out, reporter=reporter)
    except Interrupted as stop:
        print(f"longspan: {stop}; go on with 'longspan train --resume {out}'", file=sys.stderr)
        sys.exit(stop.exit_status)
    if not was_finished:
        _show(folder)


def _show(folder: RunFolder) -> None:
    """What came of it: where it is, how good, how it writes, how far it looks back."""
    from longspan.language_model import load

    final = folder.final()
    assert final is not None
    lm = load(folder.path)
    print(f"\nrun folder     {folder.path}")
    for split in SCORED:
        score = final[split]
        print(
            f"bits per byte  {score['bits_per_byte']:.4f} on the {split} split "
            f"({score['tokens']:,} tokens, {score['bytes']:,} bytes; weights of step {final['step']:,})"
        )
    counts = [(final[split]["unknown"], final[split]["tokens"]) for split in SCORED]
    for note in lost_text(lm.tokenizer, counts):
        print(f"note           {note}")
    print("\na sample:\n")
    for piece in lm.stream(tokens=SAMPLE_TOKENS, seed=folder.config.training.seed):
        print(piece, end="", flush=True)
    print("\n")
    if folder.spans.stat().st_size > 0:
        spans.show(folder)


def _option_lines() -> Iterator[str]:
    for option in documented(RunConfig):
        name = option.name.replace("_", "-")
        if "." in name:
            default = "" if option.default in ("none", "required") else f"; default: {option.default}"
            yield f"  --{name}\n      {option.help} ({option.type}{default})"
