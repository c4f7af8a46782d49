"""The CPU threads of a training, and how long they waited for a core."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import torch

from longspan.config import StageConfig
from longspan.cores import usable_cores
from longspan.distributed import local_size
from longspan.progress import duration

SLOWED = 0.1
"""The least share of the time that is worth a line."""


@contextmanager
def cpu_threads(number: Literal["auto"] | int) -> Iterator[None]:
    """Inside, torch uses so many threads; `auto` uses no more than there are cores for this process.

    The processes of torchrun on one machine divide its cores, unless `OMP_NUM_THREADS` is set.
    """
    before, sharing = torch.get_num_threads(), 1 if "OMP_NUM_THREADS" in os.environ else local_size()
    torch.set_num_threads(min(before, max(1, usable_cores() // sharing)) if number == "auto" else number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CoreWait:
    """How long threads were ready to run while other work had the cores. Only Linux counts it."""

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        self._tasks = tasks
        self._before, self._since = self._seconds(), time.perf_counter()

    def share(self) -> float:
        """The share of the time since the start, of the thread that waited longest."""
        waited = [seconds - self._before.get(task, 0.0) for task, seconds in self._seconds().items()]
        return max(waited, default=0.0) / max(time.perf_counter() - self._since, 1e-9)

    def notice(self, stage: StageConfig, steps: int) -> str | None:
        """A line for the user if the stage ended by time and got fewer `steps` because of other work."""
        by_time = stage.max_seconds is not None and stage.steps is not None and steps < stage.steps
        if not by_time or (waited := self.share()) < SLOWED:
            return None
        return (
            f"other work slowed this training down: a thread waited {waited:.0%} of the time for a core, "
            f"so {steps:,} steps in {duration(stage.max_seconds or 0)} are fewer than on a quiet machine"
        )

    def _seconds(self) -> dict[str, float]:
        """Seconds of waiting of every thread: the second number of schedstat, in nanoseconds."""
        seconds = {}
        for file in self._tasks.glob("*/schedstat"):
            with suppress(OSError, ValueError, IndexError):  # a thread may end in the meantime
                seconds[file.parent.name] = int(file.read_text().split()[1]) / 1e9
        return seconds
