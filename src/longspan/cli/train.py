"""`longspan train`: from a recipe to a trained model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan import recipes
from longspan.cli import spans
from longspan.cli.figures import final_figures
from longspan.cli.train_options import Wanted, add_options, option_lines, wanted
from longspan.streams import output_may_go_away

if TYPE_CHECKING:
    from longspan.runs import RunFolder

SAMPLE_TOKENS = 300


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model from a recipe",
        usage="longspan train [RECIPE] [--data CORPUS] [--name NAME] [--out RUN [--or-resume]]\n"
        "                      [--init RUN|FILE [--init-partial]] [--plugin MODULE] [--OPTION VALUE ...]\n"
        "       longspan train --resume RUN [--plugin MODULE] [--OPTION VALUE ...]",
        description="Train a model, score it on held-out text, print a sample and the learned spans.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.more_help = lambda: "\n".join(["options of a recipe:", *option_lines()])
    add_options(parser, default=recipes.DEFAULT)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    with output_may_go_away():
        _train(wanted(args))


def _train(wanted: Wanted) -> None:
    from longspan.runs import RunFolder
    from longspan.training import Interrupted, Strategy, reporter_for_stdout

    before = _metrics(wanted.out)
    try:
        folder = wanted.start(reporter_for_stdout(), Strategy)
    except Interrupted as stop:
        print(f"longspan: {stop}; continue with '{RunFolder(wanted.out).resume_command}'", file=sys.stderr)
        sys.exit(stop.exit_status)
    if _metrics(wanted.out) != before:  # it was not finished already
        _show(folder)


def _metrics(run: Path) -> bytes:
    path = run / "metrics.jsonl"
    return path.read_bytes() if path.is_file() else b""


def _show(folder: RunFolder) -> None:
    """Print the run folder, the scores, a sample and the learned spans."""
    from longspan.language_model import load

    final = folder.final()
    assert final is not None
    lm = load(folder.path)
    print(f"\nrun folder     {folder.path}")
    print("\n".join(final_figures(final, lm.tokenizer)))
    print("\na sample:\n")
    for piece in lm.stream(tokens=SAMPLE_TOKENS, seed=folder.config.training.seed):
        print(piece, end="", flush=True)
    print("\n")
    if folder.spans.is_file() and folder.spans.stat().st_size > 0:
        spans.show(folder)
