"""The answer of a request for text: whole, or streamed while it is generated."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longspan.errors import UserError
from longspan.serving.http.errors import api_error
from longspan.serving.http.gate import DIRECT
from longspan.serving.http.generation import Event, Generation, Prompt
from longspan.serving.http.service import ClientGone, until_gone
from longspan.serving.http.texts import DONE, Chosen, Collected, Writer
from longspan.serving.request import Token


@dataclass
class Answering:
    """A generation, and its form. `at_end` is awaited when all is generated, before the last event."""

    generation: Generation
    writer: Writer
    choices: Sequence[Chosen]
    echoed: Sequence[Prompt] | None = None  # of each choice
    at_end: Callable[[], Awaitable[None]] | None = None
    held: ExitStack = field(default_factory=ExitStack)  # is closed when the answer is over

    async def respond(self, request: Request, stream: bool) -> Response:
        """The response; an error that comes before the first token has its own status."""
        try:
            if not stream:
                return await until_gone(request.receive, self._whole())
            batches = self.generation.batches()
            first = await until_gone(request.receive, _first(batches))
        except BaseException:
            self.close()
            raise
        return EventStream(self, first, batches)

    def close(self) -> None:
        """End what still runs."""
        self.generation.cancel()
        self.held.close()

    async def _whole(self) -> Response:
        found = [Collected(chosen.index) for chosen in self.choices]
        for chosen, prompt in self._repeated():
            found[chosen.index].add(*chosen.prompt(prompt))
        async for batch in self.generation.batches():
            for number, event in batch:
                one = found[number]
                if isinstance(event, Token):
                    one.add(event.text, self.choices[number].token(event))
                else:
                    one.add(self.choices[number].end(event.text), None)
                    one.reason = event.reason
        if self.at_end is not None:
            await self.at_end()
        self.close()
        body = self.writer.whole([one.choice() for one in found], self.generation.generated)
        return Response(body, media_type="application/json")

    def opening(self) -> str:
        """The events of prompts that are repeated."""
        return "".join(
            self.writer.event(chosen.index, *chosen.prompt(prompt)) for chosen, prompt in self._repeated()
        )

    def events(self, batch: list[Event]) -> str:
        """The events of a batch; a token without complete text has one only if it has log-probabilities."""
        found, write = [], self.writer.event
        for number, event in batch:
            if isinstance(event, Token):
                marks = self.choices[number].token(event)
                if event.text or marks is not None:
                    found.append(write(number, event.text, marks))
            else:
                found.append(write(number, self.choices[number].end(event.text), None, event.reason))
        return "".join(found)

    def _repeated(self) -> Sequence[tuple[Chosen, Prompt]]:
        return () if self.echoed is None else list(zip(self.choices, self.echoed, strict=True))


class EventStream(Response):
    """Server-sent events. If the client closes the connection, generation ends."""

    media_type = "text/event-stream"

    def __init__(self, answering: Answering, first: list[Event], batches: AsyncIterator[list[Event]]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answering, self._first, self._batches = answering, first, batches

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._write(send, scope.get(DIRECT, send)))
        except ClientGone:
            pass
        finally:
            self._answering.close()

    async def _write(self, send: Send, direct: Send) -> None:
        """`direct` is the same as `send` without layers between, which would take time for every token."""
        answering = self._answering
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await _send(direct, answering.opening() + answering.events(self._first))
        try:
            async for batch in self._batches:
                await _send(direct, answering.events(batch))
            if answering.at_end is not None:
                await answering.at_end()
            last = answering.writer.last(answering.generation.generated).encode()
        except UserError as problem:  # the status has been sent: say it in the stream
            last = f"data: {json.dumps(api_error(problem).content())}\n\n".encode()
        answering.close()  # before the client knows: its next request may follow at once
        await send({"type": "http.response.body", "body": last + DONE, "more_body": False})


async def _send(send: Send, text: str) -> None:
    if text:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})


async def _first(batches: AsyncIterator[list[Event]]) -> list[Event]:
    async for batch in batches:
        return batch
    return []
