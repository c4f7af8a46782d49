"""Progress lines on standard error, and tables on standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from longspan.terminal import console, visible


def say(line: str) -> None:
    """Print one progress line."""
    print(line, file=sys.stderr)


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
