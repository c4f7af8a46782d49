"""Progress of long operations: a bar on a terminal, a plain line every few seconds elsewhere.

An operation calls `task`. Nothing is shown unless a command has said so with `showing`; a Python program that
uses the package stays silent. Progress goes to standard error, and never into the results.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from longspan.streams import lasting
from longspan.terminal import console, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PROGRESS_SECONDS = 5.0  # between plain lines
BAR_SECONDS = 0.5  # before a bar appears: short tasks show none
_BAR_WIDTH = 20


@dataclass
class Task:
    """How far an operation is. Calling it, `task(done, total)`, says where it is now; 0: total unknown."""

    what: str
    unit: str = ""  # what is counted, such as tokens; empty: nothing
    total: int = 0
    done: int = 0
    began: float = field(default_factory=time.monotonic)

    def __call__(self, done: int, total: int = 0) -> None:
        self.done, self.total = done, total or self.total

    @property
    def share(self) -> float | None:
        """None if the total is unknown."""
        return min(1.0, self.done / self.total) if self.total > 0 else None

    def words(self) -> str:
        """`scoring: 25%, 500 of 2,000 tokens, 250 tokens/s, 0:06 left`."""
        seconds = time.monotonic() - self.began
        if not self.unit:
            return f"{self.what}, {duration(seconds)}"
        rate, share = self.done / max(seconds, 1e-9), self.share
        speed = f"{rate:,.0f} {self.unit}/s" if rate >= 10 else f"{rate:.2g} {self.unit}/s"
        if share is None:
            return f"{self.what}: {self.done:,} {self.unit}, {speed}, {duration(seconds)}"
        left = "" if not self.done else f", {duration((self.total - self.done) / rate)} left"
        return f"{self.what}: {share:.0%}, {self.done:,} of {self.total:,} {self.unit}, {speed}{left}"


@contextmanager
def showing(stream: TextIO | None = None, *, quiet: bool = False) -> Iterator[None]:
    """Inside, tasks are shown on `stream`, by default standard error; with `quiet` nothing is."""
    global _display
    before = _display
    _display = None if quiet else _display_for(stream or sys.stderr)
    try:
        yield
    finally:
        _display = before


@contextmanager
def task(what: str, unit: str = "", total: int = 0, *, prints: bool = False) -> Iterator[Task]:
    """An operation. `prints` says that results are printed meanwhile: a bar would be in their way."""
    begun = Task(what, unit, total)
    with nullcontext() if _display is None else _display.follow(begun, prints):
        yield begun


@contextmanager
def told(say: Callable[[str], None], what: str, unit: str = "", total: int = 0) -> Iterator[Task]:
    """The same; if no command shows tasks, `say` gets a line every few seconds."""
    with task(what, unit, total) as begun, _said(say, begun) if _display is None else nullcontext():
        yield begun


def _said(say: Callable[[str], None], begun: Task) -> AbstractContextManager[None]:
    return every_seconds(PROGRESS_SECONDS, lambda _: say(begun.words()))


def say(line: str) -> None:
    """One line on standard error, above the bar if there is one."""
    if _display is None:
        print(line, file=sys.stderr)
    else:
        _display.say(line)


def tell(line: str) -> None:
    """A line about the progress of a command: nothing if it is quiet, or if a program uses the package."""
    if _display is not None:
        _display.say(line)


class Bars:
    """Bars at the bottom of a terminal, one for each task; lines that are said stay above them."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._live: Progress | None = None

    @contextmanager
    def follow(self, begun: Task, prints: bool = False) -> Iterator[None]:
        if prints and sys.stdout.isatty():
            yield
            return
        if self._live is not None:  # inside another task: one more row
            number = self._live.add_task("", total=None, told=begun)
            try:
                yield
            finally:
                self._live.remove_task(number)
            return
        self._live = live = bar(self._screen)
        live.add_task("", total=None, told=begun)
        late = threading.Timer(BAR_SECONDS, live.start)
        late.daemon = True
        late.start() if BAR_SECONDS > 0 else live.start()
        try:
            yield
        finally:
            self._live = None
            if BAR_SECONDS > 0:
                late.cancel()
                late.join()  # it may just be starting
            live.stop()

    def say(self, line: str) -> None:
        if self._live is not None and self._live.live.is_started:
            print_above(self._screen, line)
        else:
            print(line, file=sys.stderr, flush=True)


class Lines:
    """A line every few seconds while a task runs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = lasting(stream)

    def follow(self, begun: Task, prints: bool = False) -> AbstractContextManager[None]:
        return _said(self.say, begun)

    def say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


_display: Bars | Lines | None = None


def _display_for(stream: TextIO) -> Bars | Lines:
    if not stream.isatty():  # rich, which takes a moment to import, is not needed
        return Lines(stream)
    screen = live_console(stream)
    return Lines(stream) if screen is None else Bars(screen)


def live_console(stream: TextIO) -> Console | None:
    """rich's console if the stream is a terminal that can move its cursor, else None.

    Rich alone does not decide: FORCE_COLOR makes it take a pipe for a terminal, and with TERM=dumb it shows
    no bar. Work goes on when nobody reads the output.
    """
    shown = console(stream)
    shown.file = lasting(shown.file)
    return shown if stream.isatty() and shown.is_terminal and not shown.is_dumb_terminal else None


def bar(screen: Console, *, redirect: bool = False) -> Progress:
    """A bar and words for each task; its rows have the field `told`, a `Task` or something alike.

    With `redirect`, what is printed meanwhile goes to this console, above the bar.
    """
    from rich.progress import BarColumn, Progress, ProgressColumn
    from rich.table import Column
    from rich.text import Text

    class Bar(BarColumn):
        def render(self, task: Any) -> Any:
            share = task.fields["told"].share
            task.total, task.completed = (None, 0) if share is None else (1.0, share)
            return super().render(task)

    class Words(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(visible(task.fields["told"].words()))

    columns = Bar(_BAR_WIDTH), Words(table_column=Column(no_wrap=True, overflow="ellipsis"))
    return Progress(
        *columns, console=screen, transient=True, redirect_stdout=redirect, redirect_stderr=redirect
    )


def print_above(screen: Console, line: str) -> None:
    """A line that stays, above the bars of this console."""
    screen.print(visible(line), markup=False, highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """As minutes and seconds, 1:05, or with hours, 2:03:04."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


@contextmanager
def every_seconds(interval: float, say: Callable[[float], None]) -> Iterator[None]:
    """`say(seconds)` every `interval` seconds while the block runs, from a thread of its own."""
    began, ended = time.monotonic(), threading.Event()

    def tell() -> None:
        while not ended.wait(interval):
            say(time.monotonic() - began)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
