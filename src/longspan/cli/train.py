"""`longspan train`: from a recipe to a trained model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan import recipes
from longspan.cli import spans
from longspan.cli.figures import final_figures
from longspan.cli.train_options import add_options, option_lines, wanted

if TYPE_CHECKING:
    from longspan.config import RunConfig
    from longspan.runs import RunFolder

SAMPLE_TOKENS = 300


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a model from a recipe",
        usage="longspan train [RECIPE] [--data CORPUS] [--name NAME] [--out RUN] [--plugin MODULE]\n"
        "                      [--OPTION VALUE ...]\n"
        "       longspan train --resume RUN [--plugin MODULE]",
        description="Train a model, score it on held-out text, print a sample and the learned spans.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.more_help = lambda: "\n".join(["options of a recipe:", *option_lines()])
    add_options(parser, default=recipes.DEFAULT)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    _train(*wanted(args))


def _train(config: RunConfig | None, out: Path) -> None:
    from longspan.runs import RunFolder
    from longspan.training import Interrupted, is_finished, reporter_for_stdout, resume, train

    was_finished = config is None and is_finished(RunFolder.open(out))
    reporter = reporter_for_stdout()
    try:
        folder = resume(out, reporter=reporter) if config is None else train(config, out, reporter=reporter)
    except Interrupted as stop:
        print(f"longspan: {stop}; continue with '{RunFolder(out).resume_command}'", file=sys.stderr)
        sys.exit(stop.exit_status)
    if not was_finished:
        _show(folder)


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
