"""What the user sees while a model trains."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from longspan.streams import lasting
from longspan.terminal import console, visible


class Reporter:
    """Prints nothing; the base class of the other reporters."""

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def say(self, line: str) -> None:
        """A line that stays visible."""

    def log(self, line: str) -> None:
        """A line of metrics: printed to a log, but not to a terminal, where the status shows the same."""

    def status(self, text: str, fraction: float) -> None:
        """The current activity and the fraction of it that is done; called often."""


class PlainReporter(Reporter):
    """Plain lines, for files and pipes."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out  # None: stdout

    def say(self, line: str) -> None:
        print(line, flush=True, file=self._out)

    def log(self, line: str) -> None:
        print(line, flush=True, file=self._out)


class LiveReporter(Reporter):
    """Lines that stay, above a status line at the bottom of the terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            BarColumn(bar_width=24), TextColumn("{task.description}"), console=console, transient=True
        )
        self._task: TaskID | None = None

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        self._console.print(visible(line), markup=False, highlight=False, soft_wrap=True)

    def status(self, text: str, fraction: float) -> None:
        if self._task is None:
            self._task = self._progress.add_task("", total=1.0)
            self._progress.start()
        self._progress.update(self._task, description=visible(text), completed=fraction)


def reporter_for_stdout() -> Reporter:
    """A live status line on a terminal, plain lines elsewhere; training goes on when nobody reads them."""
    on_stdout = console()
    on_stdout.file = lasting(on_stdout.file)
    return LiveReporter(on_stdout) if on_stdout.is_terminal else PlainReporter(lasting(sys.stdout))
