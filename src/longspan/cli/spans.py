"""`longspan spans`: the learned span of every head of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from longspan.cli.paths import check_parent, expanded
from longspan.cli.plugin_option import add_plugin_option
from longspan.errors import UsageError, UserError

if TYPE_CHECKING:
    from longspan.runs import RunFolder


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "spans",
        help="show the learned span of every head",
        description="Print the learned spans, and draw them with their history as a picture.",
    )
    parser.add_argument("folder", type=expanded, metavar="RUN", help="the run folder")
    parser.add_argument(
        "--out", type=expanded, metavar="FILE.png", help="file of the picture (default: RUN/spans.png)"
    )
    parser.add_argument(
        "--freeze",
        type=expanded,
        metavar="NEW_RUN",
        help="make a new run from the best weights, with the learned spans as fixed windows",
    )
    add_plugin_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from longspan.runs import RunFolder

    folder = RunFolder.open(Path(args.folder))
    picture = Path(args.out) if args.out else None
    if picture is not None and picture.suffix != ".png":
        raise UsageError(f"the picture is a PNG file: --out must end in .png, not {picture.name}")
    if picture is not None and picture.exists():
        raise UserError(f"{picture} exists already: give --out another name")
    show(folder, picture)
    if args.freeze:
        freeze(folder, Path(args.freeze))


def freeze(folder: RunFolder, out: Path) -> None:
    from longspan.runs.freeze_spans import freeze_spans

    check_parent(out)
    freeze_spans(folder, out)
    print(f"{out}: its windows are in config.toml; try 'longspan eval {quote(str(out))}'")


def show(folder: RunFolder, picture: Path | None = None) -> None:
    """Print the spans of a run and draw them, by default into its own folder."""
    from longspan.inspection import draw_spans, read_spans, spans_as_text

    picture = picture or folder.path / "spans.png"
    history = read_spans(folder)
    draw_spans(history, picture)
    print(spans_as_text(history))
    print(f"\npicture: {picture}")
