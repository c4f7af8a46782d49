"""SIGINT, SIGTERM and SIGHUP are remembered when they arrive and handled between steps, where it is safe."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from longspan import distributed
from longspan.training.errors import Interrupted


class Interrupt:
    """While active, the first signal is only remembered; a second SIGINT or SIGTERM has its usual effect.

    A second SIGHUP has none: when a terminal is closed, it often comes from the system and from the shell.
    Under torchrun no second signal has an effect: Slurm sends SIGTERM to all processes of a job, and torchrun
    gets it too and sends it to its processes again. It kills those that have not ended after 30 seconds.
    """

    def __init__(self) -> None:
        self._caught: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers only here
            self._previous = {number: signal.signal(number, self._note) for number in _signals()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore(*self._previous)

    def check(self) -> None:
        """Raise `Interrupted` if a signal arrived, on any rank: all of them stop at the same step."""
        number = distributed.highest(self._caught or 0)
        if number:
            raise Interrupted(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._caught is None:
            self._caught = number
        if not distributed.launched():
            self._restore(signal.SIGINT, signal.SIGTERM)

    def _restore(self, *numbers: int) -> None:
        for number in numbers:
            if number in self._previous:
                signal.signal(number, self._previous.pop(number))


def _signals() -> tuple[int, ...]:
    if sys.platform == "win32" or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as with nohup
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, signal.SIGHUP
