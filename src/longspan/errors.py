"""`UserError`, the exception whose message is for the user, and helpers for error handling."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class UserError(Exception):
    """A mistake the user can fix: one line that says what is wrong and what to do.

    The command line prints it without a traceback and exits with status 1.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `; did you mean 'width'?`, or an empty string if no known name is similar."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{match[0]}'?" if match else ""


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception means that the machine or an accelerator is out of memory.

    torch has an exception class for this only on accelerators, and some libraries do not use it.
    """
    words = (
        "out of memory|can't allocate memory|not enough memory|_ALLOC_FAILED|"
        "Storage size calculation overflowed"
    )
    return isinstance(problem, MemoryError) or (
        isinstance(problem, RuntimeError) and re.search(words, str(problem)) is not None
    )
