"""One wake-up of the event loop for all events that are ready."""

from __future__ import annotations

import asyncio
import threading

from longspan.serving.http.events import Outbox, Stream


def test_events_of_a_step_come_together() -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        woken, call = [], loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda act, *given: (woken.append(act), call(act, *given))[1]  # type: ignore
        outbox, streams = Outbox(loop, interval=0.05), [Stream[int]() for _ in range(32)]

        def engine() -> None:
            for step in range(10):
                for stream in streams:
                    outbox.put(stream, step)

        thread = threading.Thread(target=engine)
        thread.start()
        found = [await stream.batch() for stream in streams]
        thread.join()
        while any(len(one) < 10 for one in found):
            for one, stream in zip(found, streams, strict=True):
                if len(one) < 10:
                    one += await stream.batch()
        assert all(one == list(range(10)) for one in found)
        assert len(woken) < 20  # of 320 events

    asyncio.run(check())


def test_the_first_event_after_a_pause_does_not_wait() -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        outbox, stream = Outbox(loop, interval=0.5), Stream[str]()
        outbox.put(stream, "a")
        began = loop.time()
        assert await stream.batch() == ["a"]
        assert loop.time() - began < 0.4
        outbox.put(stream, "b")
        outbox.put(stream, "c")
        assert await stream.batch() == ["b", "c"]
        assert loop.time() - began > 0.4

    asyncio.run(check())


def test_events_for_a_closed_loop_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    outbox = Outbox(loop)
    loop.close()
    outbox.put(Stream[str](), "nobody")
