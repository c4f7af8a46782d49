"""One wake-up of the event loop for all events that are ready."""

from __future__ import annotations

import asyncio
import threading
import time

from longspan.serving.http.events import Outbox, Stream


def test_events_of_a_step_come_together() -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        woken, call = [], loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda act, *given: (woken.append(act), call(act, *given))[1]  # type: ignore
        outbox, streams = Outbox(loop, 0.05, 0.05), [Stream[int]() for _ in range(32)]

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
        outbox, stream = Outbox(loop, 0.5, 0.5), Stream[str]()
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


def test_deliveries_that_take_long_are_rare() -> None:
    """The loop is busy for 10 ms with each: they come together after ten times as long."""

    async def check() -> None:
        loop = asyncio.get_running_loop()
        outbox, stream = Outbox(loop, 0.001, 0.1), Stream[int]()
        sizes, began = [], loop.time()
        stop = threading.Event()

        def engine() -> None:
            number = 0
            while not stop.wait(0.005):
                outbox.put(stream, number)
                number += 1

        thread = threading.Thread(target=engine)
        thread.start()
        while loop.time() - began < 0.6:
            sizes.append(len(await stream.batch()))
            end = time.thread_time() + 0.01
            while time.thread_time() < end:
                pass
        stop.set()
        thread.join()
        assert len(sizes) <= 9

    asyncio.run(check())
