"""`longspan spans`: how far every head of a run has learned to look back."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from longspan.cli.plugin_option import add_plugin_option
from longspan.errors import UserError

if TYPE_CHECKING:
    from longspan.runs import RunFolder


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "spans",
        help="how far every head of a run has learned to look back",
        description="Show the learned spans in the terminal and draw them, with their history, as a picture.",
    )
    parser.add_argument("folder", metavar="RUN", help="the run folder")
    parser.add_argument("--out", metavar="FILE.png", help="where the picture goes (default: RUN/spans.png)")
    parser.add_argument(
        "--freeze",
        metavar="NEW_RUN",
        help="make a run of the best weights with their spans as fixed windows, as far as each head sees",
    )
    add_plugin_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from longspan.runs import RunFolder

    folder = RunFolder.open(Path(args.folder))
    picture = Path(args.out) if args.out else None
    if picture is not None and picture.suffix != ".png":
        raise UserError(f"the picture is a PNG: give --out a name that ends in .png, not {picture.name}")
    if picture is not None and picture.exists():
        raise UserError(f"{picture} exists already: give --out another name")
    show(folder, picture)
    if args.freeze:
        freeze(folder, Path(args.freeze))


def freeze(folder: RunFolder, out: Path) -> None:
    from longspan.runs.freeze_spans import freeze_spans

    freeze_spans(folder, out)
    print(f"{out}: its windows are in config.toml; try 'longspan eval {quote(str(out))}'")


def show(folder: RunFolder, picture: Path | None = None) -> None:
    """Print the spans of a run and draw them, into its own folder unless told otherwise."""
    from longspan.inspection import draw_spans, read_spans, spans_as_text

    picture = picture or folder.path / "spans.png"
    history = read_spans(folder)
    draw_spans(history, picture)
    print(spans_as_text(history))
    print(f"\npicture: {picture}")
