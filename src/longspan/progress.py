"""Telling how far something long has come, in a log that should stay short."""

from __future__ import annotations

from collections.abc import Callable


def every_tenth(say: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """`say(done, total)`, but only when another tenth of the way is done; an unknown total is 0."""
    said = 0

    def tell(done: int, total: int) -> None:
        nonlocal said
        tenths = 10 * done // total if total else 0
        if tenths > said:
            said = tenths
            say(done, total)

    return tell
