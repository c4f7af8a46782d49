"""Progress of long operations, in few lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PROGRESS_SECONDS = 5.0  # between lines about something that takes long


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
