"""Time, lap by lap."""

from __future__ import annotations

import time


class Clock:
    """Runs from the moment it is made; every lap is the time since the one before."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap ended."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before
