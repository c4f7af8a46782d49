"""`UserError`, the exception whose message is for the user, and helpers for error handling."""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

LONGEST_LINE = 2000  # of a message; longer ones quote a very long argument


class UserError(Exception):
    """A mistake the user can fix: one line that says what is wrong and what to do.

    The command line prints it without a traceback and exits with status 1.
    """

    def __str__(self) -> str:
        """The message as one line: it may quote names that contain line ends or escape codes of terminals."""
        return _one_line(super().__str__())


def _one_line(text: str) -> str:
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )
    return (
        shown
        if len(shown) <= LONGEST_LINE
        else f"{shown[: LONGEST_LINE // 2]} ... {shown[-LONGEST_LINE // 4 :]}"
    )


class UsageError(UserError):
    """A mistake in the words of a command, found without looking at any file; the exit status is 2."""


@contextmanager
def usage_errors() -> Iterator[None]:
    """Inside, a `UserError` is a `UsageError`: for checks that see only the words of a command."""
    try:
        yield
    except UserError as problem:
        raise UsageError(str(problem)) from None


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `; did you mean 'width'?`, or an empty string if no known name is similar."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{match[0]}'?" if match else ""


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception means that the machine or an accelerator is out of memory.

    torch has an exception class for this only on accelerators, and some libraries do not use it.
    """
    words = (
        "out of memory|can't allocate memory|not enough memory|_ALLOC_FAILED|"
        "Storage size calculation overflowed|integer multiplication overflow"
    )
    library = "failed to map segment|[Cc]annot allocate memory"  # a library that cannot be loaded
    return (
        isinstance(problem, MemoryError)
        or (isinstance(problem, OSError) and problem.errno == errno.ENOMEM)
        or (isinstance(problem, RuntimeError) and re.search(words, str(problem)) is not None)
        or (isinstance(problem, ImportError | OSError) and re.search(library, str(problem)) is not None)
    )
