"""`longspan train`: from a recipe to a trained model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan import recipes
from longspan.cli import spans
from longspan.cli.figures import final_figures
from longspan.cli.recipe_help import recipe_help
from longspan.cli.train_options import Wanted, add_options, reporter, wanted
from longspan.errors import UsageError
from longspan.streams import output_may_go_away

if TYPE_CHECKING:
    from longspan.runs import RunFolder

SAMPLE_TOKENS = 300


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model from a recipe",
        usage="longspan train [RECIPE] [--data CORPUS] [--name NAME] [--out RUN [--or-resume]]\n"
        "                      [--init RUN|FILE [--init-partial]] [--quiet | --verbose]\n"
        "                      [--no-sample] [--json] [--dry-run] [--plugin MODULE] [--OPTION VALUE ...]\n"
        "       longspan train --resume RUN [--quiet | --verbose] [--no-sample] [--json]\n"
        "                      [--plugin MODULE] [--OPTION VALUE ...]",
        description="Train a model, score it on held-out text, print a sample and the learned spans.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.more_help = recipe_help
    add_options(parser, default=recipes.DEFAULT)
    parser.add_argument("--no-sample", action="store_true", help="print no sample at the end")
    parser.add_argument(
        "--json", action="store_true", help="print the result as one JSON object; progress goes to stderr"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="time a few steps with random tokens, print size, memory and time, and make no run",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    asked = wanted(args)
    with output_may_go_away():
        if args.dry_run:
            _estimate(asked, args)
        else:
            asked.check_text()
            _train(asked, args)


def _estimate(wanted: Wanted, args: argparse.Namespace) -> None:
    from longspan.cli.dry_run import as_text, dry_run

    if wanted.config is None:
        raise UsageError("--dry-run is for a new run: leave out --resume")
    facts = dry_run(wanted.config)
    print(json.dumps(facts) if args.json else as_text(facts))


def _train(wanted: Wanted, args: argparse.Namespace) -> None:
    from longspan.distributed import is_first
    from longspan.training import Strategy

    before = _metrics(wanted.out)
    folder = wanted.start(reporter(args), Strategy)
    if not is_first():
        return
    if args.json:
        print(json.dumps({"run": str(folder.path), "final": folder.final()}))
    elif _metrics(wanted.out) != before:  # it was not finished already
        _show(folder, sample=not (args.no_sample or args.quiet), learned_spans=not args.quiet)


def _metrics(run: Path) -> bytes:
    path = run / "metrics.jsonl"
    return path.read_bytes() if path.is_file() else b""


def _show(folder: RunFolder, *, sample: bool, learned_spans: bool) -> None:
    """Print the run folder, the scores, a sample and the learned spans."""
    from longspan.language_model import load

    final = folder.final()
    assert final is not None
    lm = load(folder.path)
    print(f"\nrun folder     {folder.path}")
    print("\n".join(final_figures(final, lm.tokenizer)))
    if sample:
        print("\na sample:\n")
        for piece in lm.stream(tokens=SAMPLE_TOKENS, seed=folder.config.training.seed):
            print(piece, end="", flush=True)
        print("\n")
    if learned_spans and folder.spans.is_file() and folder.spans.stat().st_size > 0:
        spans.show(folder)
