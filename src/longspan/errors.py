"""The one exception that is meant for the person at the keyboard, and how to tell a few others."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can put right: one line that says what is wrong and what to do.

    The command line prints it without a traceback and exits with status 1.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `; did you mean 'width'?`, or nothing when no known name is close."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{match[0]}'?" if match else ""


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether the machine or an accelerator has less memory than was asked for.

    torch has a class of its own for this only on accelerators, and not for every library it calls there.
    """
    words = (
        "out of memory|can't allocate memory|not enough memory|_ALLOC_FAILED|"
        "Storage size calculation overflowed"
    )
    return isinstance(problem, MemoryError) or (
        isinstance(problem, RuntimeError) and re.search(words, str(problem)) is not None
    )
