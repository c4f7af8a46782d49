"""`longspan search`: from a recipe with [search] to a pattern of blocks and the recipe that trains it."""

from __future__ import annotations

import argparse
from shlex import quote
from typing import TYPE_CHECKING, Any

from longspan.cli.figures import SCORED, final_figures
from longspan.cli.recipe_help import recipe_help
from longspan.cli.train_options import Wanted, add_options, reporter, wanted
from longspan.errors import UsageError
from longspan.json_text import to_json
from longspan.streams import output_may_go_away

if TYPE_CHECKING:
    from longspan.runs import RunFolder

DEFAULT = "wikitext2-par-search"


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "search",
        help="search the pattern of a model's blocks",
        usage="longspan search [RECIPE] [--data CORPUS] [--name NAME] [--out RUN [--or-resume]] [--top N]\n"
        "                       [--quiet | --verbose] [--json] [--plugin MODULE] [--OPTION VALUE ...]\n"
        "       longspan search --resume RUN [--top N] [--quiet | --verbose] [--json] [--plugin MODULE]\n"
        "                       [--OPTION VALUE ...]",
        description="Train a supernet whose blocks learn their kind: attention, long attention, feed-\n"
        "forward or identity. Print the pattern that was found. Write a picture of the probabilities, an\n"
        "animation of their history, and the recipe found.toml, which 'longspan train' trains from scratch.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.more_help = recipe_help
    add_options(parser, default=DEFAULT)
    parser.add_argument(
        "--top", type=int, default=1, metavar="N", help="show the N most likely patterns (default: 1)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as one JSON object; progress goes to stderr"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if args.top < 1:
        raise UsageError(f"--top must be at least 1, not {args.top}")
    with output_may_go_away():
        asked = wanted(args)
        asked.check_text()
        from longspan.distributed import is_first

        folder = _search(asked, args)
        if is_first():
            _show(folder, args.top, as_json=args.json)


def _search(wanted: Wanted, args: argparse.Namespace) -> RunFolder:
    from longspan.search import Searching

    return wanted.start(reporter(args), Searching)


def _show(folder: RunFolder, top: int, *, as_json: bool) -> None:
    """Print the result, its scores inside the supernet, and the next command."""
    from longspan.search import read_findings, write_findings

    final = folder.final()
    assert final is not None
    findings = read_findings(folder, top)
    picture, animation, recipe = write_findings(folder, findings, final["step"])
    if as_json:
        likely = [{"pattern": pattern, "probability": probability} for pattern, probability in findings.top]
        print(to_json({"run": str(folder.path), "patterns": likely, "recipe": str(recipe), "final": final}))
        return
    print(f"\nrun folder     {folder.path}")
    for pattern, probability in findings.top:
        print(f"pattern        {pattern}  probability {probability:.4f}")
    print("\n".join(final_figures(final, folder.tokenizer())))
    for split in SCORED:
        hard, soft = final[split]["loss"], final[split]["soft"]["loss"]
        print(
            f"loss           {hard:.4f} as {findings.pattern} alone (hard, as all above), "
            f"{soft:.4f} as the mixture (soft) on the {split} split"
        )
    print(f"picture        {picture}\nanimation      {animation}")
    print(f"recipe         {recipe}: train it from scratch with 'longspan train {quote(str(recipe))}'")
