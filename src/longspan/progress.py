"""Progress of long operations, in few lines."""

from __future__ import annotations

from collections.abc import Callable


def every_tenth(say: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """`say(done, total)`, but only once per tenth of the total; 0 means that the total is unknown."""
    said = 0

    def tell(done: int, total: int) -> None:
        nonlocal said
        tenths = 10 * done // total if total else 0
        if tenths > said:
            said = tenths
            say(done, total)

    return tell
