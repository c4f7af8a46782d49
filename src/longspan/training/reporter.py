"""What the user sees while a model trains."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import TextIO

from rich.console import Console

from longspan.progress import bar, live_console, print_above
from longspan.streams import lasting


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


@dataclass
class _Status:
    """What a bar shows: text and the share that is done."""

    text: str = ""
    share: float = 0.0

    def words(self) -> str:
        return self.text


class LiveReporter(Reporter):
    """Lines that stay, above a status line at the bottom of the terminal.

    `verbose` also prints the lines of metrics. If `lines` are given, all lines go there instead.
    """

    def __init__(self, console: Console, *, verbose: bool = False, lines: Reporter | None = None) -> None:
        self._console, self._verbose, self._lines = console, verbose, lines
        self._bar, self._status = bar(console, redirect=lines is None), _Status()

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        if self._lines is not None:
            self._lines.say(line)
        else:
            print_above(self._console, line)

    def log(self, line: str) -> None:
        if self._lines is not None:
            self._lines.log(line)
        elif self._verbose:
            self.say(stamped(line))

    def score(self, line: str) -> None:
        if self._lines is not None:
            self._lines.score(line)
        else:
            self.say(line)

    def status(self, text: str, fraction: float) -> None:
        self._status.text, self._status.share = text, fraction
        if not self._bar.tasks:
            self._bar.add_task("", told=self._status)
            self._bar.start()


def reporter_for(stream: TextIO, *, verbose: bool = False) -> Reporter:
    """A live status line on a terminal that can move its cursor, plain lines elsewhere.

    If the lines go to a file or a pipe, but standard error is a terminal, the status line is there. Training
    goes on when nobody reads the output.
    """
    if (shown := live_console(stream)) is not None:
        return LiveReporter(shown, verbose=verbose)
    plain = PlainReporter(lasting(stream))
    beside = live_console(sys.stderr) if stream is sys.stdout and not stream.isatty() else None
    return plain if beside is None else LiveReporter(beside, lines=plain)


def reporter_for_stdout() -> Reporter:
    return reporter_for(sys.stdout)


def stamped(line: str) -> str:
    """The line after the local time."""
    return f"{datetime.now():%Y-%m-%d %H:%M:%S}  {line}"
