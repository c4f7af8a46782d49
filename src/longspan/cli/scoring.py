"""What all forms of `longspan eval` share: the title above a score, and progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from longspan.cli.console import say
from longspan.progress import every_tenth
from longspan.terminal import console


def title(where: Mapping[str, str]) -> str:
    """Which checkpoint of which run was scored on which text."""
    from longspan.data.corpus import WHOLE

    part = (
        f"all of {where['corpus']}"
        if where["split"] == WHOLE
        else "the {split} split of {corpus}".format(**where)
    )
    return "{run} ({checkpoint} checkpoint) on ".format(**where) + part


@contextmanager
def scoring_progress(first: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Progress: a live line on a terminal, a plain line at every tenth elsewhere; only the first rank's."""
    if not first:
        yield None
        return
    if not sys.stderr.isatty():
        yield every_tenth(lambda done, total: say(f"{done:,} of {total:,} tokens"))
        return
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("scoring"), MofNCompleteColumn(), TextColumn("tokens, left"), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("scoring", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
