"""The one exception that is meant for the person at the keyboard."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can put right: one line that says what is wrong and what to do.

    The command line prints it without a traceback and exits with status 1.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint such as `; did you mean 'width'?`, or nothing when no known name is close."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{match[0]}'?" if match else ""
