"""`log.txt` of a run folder: what the terminal says, as plain lines."""

from __future__ import annotations

from io import TextIOWrapper
from pathlib import Path
from types import TracebackType

from longspan.runs.no_links import open_to_append
from longspan.training.reporter import Reporter, stamped


class RunLog(Reporter):
    """Passes everything on to another reporter, and appends the lines to a file once it is opened.

    Lines that come before are kept until then: a run folder is created late. The file is never shortened. A
    resumed run appends to it, so steps that were lost with a crash appear twice.
    """

    def __init__(self, shown: Reporter) -> None:
        self._shown = shown
        self._waiting: list[str] = []
        self._file: TextIOWrapper | None = None

    def __enter__(self) -> RunLog:
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            if kind is not None:
                self.note(f"stopped: {problem}" if str(problem) else f"stopped: {kind.__name__}")
            self._file.close()
            self._file = None
        self._shown.__exit__(kind, problem, trace)

    def open(self, path: Path) -> None:
        """Append the lines so far and all that follow to the file `path`."""
        self._file = TextIOWrapper(open_to_append(path), encoding="utf-8", errors="backslashreplace")
        for line in self._waiting:
            self.note(line)
        self._waiting = []

    def note(self, line: str) -> None:
        """A line for the file only."""
        if self._file is None:
            self._waiting.append(line)
        else:
            self._file.write(f"{line}\n")
            self._file.flush()

    def say(self, line: str) -> None:
        self._shown.say(line)
        self.note(line)

    def log(self, line: str) -> None:
        self._shown.log(line)
        self.note(stamped(line))

    def score(self, line: str) -> None:
        self._shown.score(line)
        self.note(stamped(line))

    def status(self, text: str, fraction: float) -> None:
        self._shown.status(text, fraction)
