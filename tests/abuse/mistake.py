"""A mistake of a user: the words of a command, and how the command must fail."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

USAGE, FAILURE = 2, 1


@dataclass(frozen=True)
class Mistake:
    words: tuple[str, ...]
    line: str  # a regular expression, found in the one line on stderr
    status: int

    @property
    def name(self) -> str:
        """The command as typed, cut, in ASCII."""
        typed = shlex.join(self.words)
        short = typed if len(typed) <= 100 else f"{typed[:70]}...{len(typed)} characters"
        return short.encode("unicode_escape").decode().replace("::", ": :")


def usage(words: str | Sequence[str], line: str) -> Mistake:
    """A mistake in the words of a command."""
    return Mistake(_words(words), line, USAGE)


def failure(words: str | Sequence[str], line: str) -> Mistake:
    """A mistake that is found only by looking at files, texts or the machine."""
    return Mistake(_words(words), line, FAILURE)


def _words(words: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(shlex.split(words)) if isinstance(words, str) else tuple(words)
