"""Notes on standard error, tables on standard output, and the option that silences progress."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from longspan.cli.paths import as_path
from longspan.progress import say
from longspan.terminal import console, visible

__all__ = ["STDOUT", "add_json_option", "add_quiet_option", "say", "show_table"]

STDOUT = Path("-")


def add_quiet_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def add_json_option(parser: argparse.ArgumentParser, what: str) -> None:
    """`--json`, which prints JSON in place of tables, and `--json FILE`."""
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        type=as_path,
        metavar="FILE",
        help=f"print {what} as one JSON object; with FILE: write them to a new file, besides the tables",
    )


def show_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, numbers: bool = False) -> None:
    """Rows under a header; with `numbers` all columns but the first are right-aligned."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for index, title in enumerate(header):
        table.add_column(title, justify="right" if numbers and index else "left", overflow="fold")
    for row in rows:
        shown = map(visible, row) if sys.stdout.isatty() else row
        table.add_row(*map(Text, shown))  # a bracket in a path is not markup
    # Not a terminal: as wide as it needs to be, so that a log or a pipe gets whole lines.
    console(width=None if sys.stdout.isatty() else 250).print(table)
