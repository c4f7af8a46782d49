"""A lap timer."""

from __future__ import annotations

import time


class Clock:
    """Starts when it is created; every lap is the time since the previous lap."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap ended."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before
