"""Standard streams that are closed when the program starts, or whose other end goes away."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, Any, TextIO, cast

_GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe has ended; the terminal was closed


def open_missing() -> None:
    """Open the null device in place of standard streams that are closed.

    Otherwise the next file that is opened gets their number, and what a library prints goes into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (until the end)


@contextmanager
def output_may_go_away() -> Iterator[None]:
    """Inside, nobody has to read what is printed."""
    with redirect_stdout(lasting(sys.stdout)), redirect_stderr(lasting(sys.stderr)):
        yield


def lasting(stream: IO[str]) -> TextIO:
    """The same stream, but when its reader has gone away, text is dropped instead of raising an error."""
    return cast(TextIO, _Lasting(stream))


class _Lasting:
    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as problem:
            self._drop(problem)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as problem:
            self._drop(problem)

    def _drop(self, problem: OSError) -> None:
        """Send the stream to the null device: text that waits in buffers goes there too."""
        if problem.errno not in _GONE:
            raise problem
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
