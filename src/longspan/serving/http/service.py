"""What is served: models with their engines, sessions, runs to show; shared by all requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive

from longspan.serving.http.errors import ApiError
from longspan.serving.http.events import Outbox
from longspan.serving.http.metrics import Metrics, Numbers
from longspan.serving.jobs import Cancelled
from longspan.serving.limits import Limits, Stopping

if TYPE_CHECKING:
    from longspan.language_model import LoadedModel
    from longspan.serving.engine import Engine
    from longspan.serving.jobs import Job
    from longspan.serving.sessions import Sessions

Result = TypeVar("Result")
_LONG_TEXT = 10_000  # characters; a longer one is tokenized in another thread


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class Served:
    """A model and the engine that runs it."""

    id: str
    lm: LoadedModel
    engine: Engine
    created: int = field(default_factory=lambda: int(time.time()))

    async def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        if not text:
            return []
        encode = self.lm.tokenizer.encode
        ids = await run_in_threadpool(encode, text) if len(text) > _LONG_TEXT else encode(text)
        found: list[int] = np.asarray(ids).tolist()
        return found

    def pieces(self, ids: list[int]) -> list[str]:
        """The text of each token; bytes that are no whole character as \\xe2."""
        return [self.texts[token] for token in ids]

    @cached_property
    def texts(self) -> list[str]:
        """The text of every token of the vocabulary."""
        return [piece.decode("utf-8", "backslashreplace") for piece in self.lm.tokenizer.pieces()]


@dataclass
class Service:
    """Everything that requests need."""

    models: Mapping[str, Served]
    sessions: Sessions
    limits: Limits
    runs: Mapping[str, Path] = field(default_factory=dict)  # to show, by name
    metrics: Metrics = field(default_factory=Metrics)
    stopping: bool = False
    _outbox: Outbox | None = None
    _in_use: set[str] = field(default_factory=set)  # sessions that change

    def __post_init__(self) -> None:
        self.metrics.registry.register(Numbers(self))

    @property
    def outbox(self) -> Outbox:
        """Of the event loop that serves."""
        if self._outbox is None:
            self._outbox = Outbox(asyncio.get_running_loop())
        return self._outbox

    def model(self, name: str) -> Served:
        """A model by its id."""
        found = self.models.get(name)
        if found is None:
            raise ApiError(404, f"there is no model '{name}': see /v1/models", "model_not_found", "model")
        return found

    @contextmanager
    def using(self, session: str) -> Iterator[None]:
        """For a request that changes a session: no other one may do so at the same time."""
        if session in self._in_use:
            raise ApiError(409, f"session '{session}' is in use by another request", "session_in_use")
        self._in_use.add(session)
        try:
            yield
        finally:
            self._in_use.discard(session)

    async def result(self, submit: Callable[[Callable[[Result | Exception], None]], Job]) -> Result:
        """What an engine calls back with. If the request is cancelled, so is the job."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result | Exception] = loop.create_future()

        def done(found: Result | Exception) -> None:
            def settle() -> None:
                if not future.done():
                    future.set_result(found)

            loop.call_soon_threadsafe(settle)

        job = submit(done)
        try:
            found = await future
        except asyncio.CancelledError:
            job.cancel()
            raise
        if isinstance(found, Cancelled):  # not by us: the engine stops
            raise Stopping("the server is stopping")
        if isinstance(found, Exception):
            raise found
        return found

    def stop(self, seconds: float) -> None:
        """Take no more work, and let the engines finish what runs; returns at once."""
        self.stopping = True
        for served in self.models.values():
            threading.Thread(target=served.engine.stop, args=(seconds,), daemon=True).start()


async def until_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client closes the connection."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _end(watch)
        await _end(task)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
