"""Sessions: states that stay on the server between requests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from longspan.serving.http.answering import Answering
from longspan.serving.http.answers import DeletedSession, SessionAnswer, SessionCompletion, SessionList
from longspan.serving.http.completions import EVENTS, usage_wanted
from longspan.serving.http.errors import documented
from longspan.serving.http.gate import BINARY, UPLOAD
from longspan.serving.http.generation import Generation, sampling
from longspan.serving.http.schemas import AppendRequest, NewSession, SessionGeneration
from longspan.serving.http.service import Served, Service, until_gone
from longspan.serving.http.texts import Chosen, Writer

if TYPE_CHECKING:
    from longspan.reading import TextState
    from longspan.serving.sessions import Session

router = APIRouter(prefix="/v1/sessions")
Id = Annotated[str, Path(max_length=64, pattern="^[A-Za-z0-9_-]+$")]
_LISTED = 200  # characters of each text in the list of all sessions
_BINARY: dict[str, Any] = {BINARY: {"schema": {"type": "string", "format": "binary"}}}


async def _answer(act: Callable[..., Session], *given: Any) -> Response:
    """What `act`, which may wait for the disk, returns."""
    return JSONResponse(_shown(await run_in_threadpool(act, *given)))


def _shown(session: Session) -> dict[str, Any]:
    names = ("id", "model", "tokens", "text_tail", "created", "last_used", "saved", "in_memory", "bytes")
    return {"object": "session", **{name: getattr(session, name) for name in names}}


async def _read(service: Service, served: Served, start: TextState | None, text: str) -> TextState:
    ids = await served.encode(text)
    service.limits.check_prompt(len(ids))
    return await service.result(lambda done: served.engine.read(start, ids, done))


@router.post("", response_model=SessionAnswer, responses=documented(400, 404, 413, 415, 422, 429))
async def create(request: Request, asked: NewSession) -> Response:
    """A new session; it has read `text`."""
    service: Service = request.app.state.service
    served = service.model(asked.model)
    state = await until_gone(request.receive, _read(service, served, None, asked.text))
    return await _answer(service.sessions.create, served.id, state, asked.text)


@router.get("", response_model=SessionList, responses=documented())
async def every(request: Request) -> Response:
    """All sessions."""
    found = await run_in_threadpool(request.app.state.service.sessions.list)
    short = [replace(session, text_tail=session.text_tail[-_LISTED:]) for session in found]
    return JSONResponse({"object": "list", "data": [_shown(session) for session in short]})


@router.get("/{session}", response_model=SessionAnswer, responses=documented(404, 422))
async def one(request: Request, session: Id) -> Response:
    """One session."""
    return await _answer(request.app.state.service.sessions.get, session)


@router.delete("/{session}", response_model=DeletedSession, responses=documented(400, 404, 409, 422))
async def delete(request: Request, session: Id) -> Response:
    """Delete a session, also its saved file."""
    service: Service = request.app.state.service
    with service.using(session):
        await run_in_threadpool(service.sessions.delete, session)
    return JSONResponse({"id": session, "object": "session", "deleted": True})


@router.post(
    "/{session}/append",
    response_model=SessionAnswer,
    responses=documented(400, 404, 409, 413, 415, 422, 429),
)
async def append(request: Request, session: Id, asked: AppendRequest) -> Response:
    """The session reads more text."""
    service: Service = request.app.state.service
    with service.using(session):
        before = await run_in_threadpool(service.sessions.get, session)
        served = service.model(before.model)
        state = await run_in_threadpool(service.sessions.state, session)
        after = await until_gone(request.receive, _read(service, served, state, asked.text))
        return await _answer(service.sessions.update, session, after, before.text_tail + asked.text)


@router.post(
    "/{session}/generate",
    response_model=SessionCompletion,
    responses={200: {"content": EVENTS}, **documented(400, 404, 409, 413, 415, 422, 429)},
)
async def generate(request: Request, session: Id, asked: SessionGeneration) -> Response:
    """Continue the text of a session. Its state is then the one after the new text.

    If the client closes the connection before the end, the session stays as it was.
    """
    service: Service = request.app.state.service
    with ExitStack() as held:
        held.enter_context(service.using(session))
        how = sampling(asked, service)
        before = await run_in_threadpool(service.sessions.get, session)
        served = service.model(before.model)
        state = await run_in_threadpool(service.sessions.state, session)
        generation = Generation(service, served, 1)
        generation.add(state, (), how, keep_state=True)

        async def at_end() -> None:
            after = generation.jobs[0].state
            assert after is not None
            tail = before.text_tail + "".join(choices[0].parts)
            await run_in_threadpool(service.sessions.update, session, after, tail)

        writer = Writer(served.id, 0, usage_wanted(asked), {"session": session})
        choices = [Chosen(0, served.texts, asked.logprobs)]
        answering = Answering(generation, writer, choices, at_end=at_end, held=held.pop_all())
    return await answering.respond(request, bool(asked.stream))


@router.post(
    "/{session}/fork", response_model=SessionAnswer, responses=documented(400, 404, 413, 415, 422, 429)
)
async def fork(request: Request, session: Id) -> Response:
    """A new session with the same state; both continue on their own."""
    return await _answer(request.app.state.service.sessions.fork, session)


@router.post(
    "/{session}/save", response_model=SessionAnswer, responses=documented(400, 404, 413, 415, 422, 429)
)
async def save(request: Request, session: Id) -> Response:
    """Write a session to the server's disk: it is there again after a restart."""
    return await _answer(request.app.state.service.sessions.save, session)


@router.get(
    "/{session}/file",
    response_class=Response,
    responses={200: {"content": _BINARY}, **documented(400, 404, 413, 422)},
)
async def file(request: Request, session: Id) -> Response:
    """The state of a session as a safetensors file."""
    data = await run_in_threadpool(request.app.state.service.sessions.export, session)
    headers = {"Content-Disposition": f'attachment; filename="{session}.safetensors"'}
    return Response(data, media_type=BINARY, headers=headers)


@router.post(
    UPLOAD.removeprefix("/v1/sessions"),
    response_model=SessionAnswer,
    responses=documented(400, 404, 413, 415, 422, 429),
    openapi_extra={"requestBody": {"required": True, "content": _BINARY}},
)
async def load(request: Request, model: Annotated[str, Query(max_length=500)]) -> Response:
    """A new session from a file of `/v1/sessions/{id}/file`; the body is read as safetensors only."""
    service: Service = request.app.state.service
    served = service.model(model)
    data = await request.body()
    return await _answer(service.sessions.load, data, served.id)
