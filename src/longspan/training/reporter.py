"""What the user sees while a model trains."""

from __future__ import annotations

import sys
from datetime import datetime
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

    def score(self, line: str) -> None:
        """A line with a score on held-out text, which stays visible."""
        self.say(line)

    def status(self, text: str, fraction: float) -> None:
        """The current activity and the fraction of it that is done; called often."""


class PlainReporter(Reporter):
    """Plain lines, for files and pipes; metrics have a time stamp."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream  # None: standard output at the time of each line

    def say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)

    def log(self, line: str) -> None:
        self.say(stamped(line))

    def score(self, line: str) -> None:
        self.say(stamped(line))


class LiveReporter(Reporter):
    """Lines that stay, above a status line at the bottom of the terminal.

    `verbose` also prints the lines of metrics.
    """

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self._console, self._verbose = console, verbose
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

    def log(self, line: str) -> None:
        if self._verbose:
            self.say(stamped(line))

    def status(self, text: str, fraction: float) -> None:
        if self._task is None:
            self._task = self._progress.add_task("", total=1.0)
            self._progress.start()
        self._progress.update(self._task, description=visible(text), completed=fraction)


def reporter_for(stream: TextIO, *, verbose: bool = False) -> Reporter:
    """A live status line on a terminal that can move its cursor, plain lines elsewhere.

    Rich alone does not decide: FORCE_COLOR makes it take a pipe for a terminal, and with TERM=dumb it shows
    no status line. Both would lose the lines of metrics. Training goes on when nobody reads the output.
    """
    shown = console(stream)
    shown.file = lasting(shown.file)
    live = stream.isatty() and shown.is_terminal and not shown.is_dumb_terminal
    return LiveReporter(shown, verbose=verbose) if live else PlainReporter(lasting(stream))


def reporter_for_stdout() -> Reporter:
    return reporter_for(sys.stdout)


def stamped(line: str) -> str:
    """The line after the local time."""
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}"
