"""SIGINT and SIGTERM are remembered when they arrive and handled between steps, where it is safe."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from longspan.training.errors import Interrupted


class Interrupt:
    """While active, the first signal is only remembered; a second one has its usual effect."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._caught: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers only here
            self._previous = {number: signal.signal(number, self._note) for number in self._SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_listening()

    def check(self) -> None:
        """Raise `Interrupted` if a signal arrived."""
        if self._caught is not None:
            raise Interrupted(self._caught)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._caught = number
        self._stop_listening()

    def _stop_listening(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
