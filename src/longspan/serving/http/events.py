"""From the threads of engines to the event loop: one wake-up for all tokens that are ready.

Writing to many clients can take as long as a step of a small model, and Python runs one thread at a time. So
the loop is not woken for every token, and the time between two deliveries is a multiple of the time that one
takes; tokens that became ready meanwhile are delivered together.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

SHORTEST, LONGEST = 0.004, 0.025  # seconds between two deliveries; the first after a pause is immediate
SHARE = 10  # the time between deliveries, as a multiple of the CPU time of the loop for one
Event = TypeVar("Event")


class Stream(Generic[Event]):
    """The events of one request; read on the event loop."""

    def __init__(self) -> None:
        self._ready: list[Event] = []
        self._waiting: asyncio.Future[None] | None = None

    async def batch(self) -> list[Event]:
        """All events that are ready, at least one."""
        if not self._ready:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        found, self._ready = self._ready, []
        return found

    def add(self, event: Event) -> None:
        """On the event loop; `wake` follows."""
        self._ready.append(event)

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class Outbox:
    """Events that engines leave for streams; `put` may be called from any thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, shortest: float = SHORTEST, longest: float = LONGEST
    ) -> None:
        self._loop, self._shortest, self._longest = loop, shortest, longest
        self._interval, self._used = shortest, 0.0  # until the next delivery; CPU time of the loop so far
        self._events: deque[tuple[Stream[Any], Any]] = deque()
        self._woken = False  # whether a delivery is under way
        self._last = float("-inf")  # time of the last delivery

    def put(self, stream: Stream[Event], event: Event) -> None:
        """Leave an event for a stream."""
        self._events.append((stream, event))
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._schedule)

    def callback(self, stream: Stream[Event]) -> Callable[[Event], None]:
        """A function for an engine to call with every event of a stream."""
        return lambda event: self.put(stream, event)

    def _schedule(self) -> None:
        used = time.thread_time()  # since the last delivery: that of writing what it delivered
        self._interval = min(max(SHARE * (used - self._used), self._shortest), self._longest)
        wait = self._last + self._interval - self._loop.time()
        if wait > 0:
            self._loop.call_later(wait, self._deliver)
        else:
            self._deliver()

    def _deliver(self) -> None:
        self._woken = False  # before the events are taken: one that is left from here on wakes the loop again
        self._last, self._used = self._loop.time(), time.thread_time()
        reached: dict[int, Stream[Any]] = {}
        for _ in range(len(self._events)):
            stream, event = self._events.popleft()
            stream.add(event)
            reached[id(stream)] = stream
        for stream in reached.values():
            stream.wake()
