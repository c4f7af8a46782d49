"""Every error has OpenAI's form: `{"error": {"message", "type", "param", "code"}}`, with a proper status."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from longspan.errors import UserError
from longspan.serving import limits

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {409: "conflict_error", 429: "rate_limit_error"}
_CODES = {404: "not_found", 405: "method_not_allowed"}
_REFUSALS: dict[type[UserError], tuple[int, str]] = {
    limits.Busy: (429, "queue_full"),
    limits.Stopping: (503, "server_stopping"),
    limits.PromptTooLong: (400, "context_length_exceeded"),
    limits.TooManyTokens: (400, "max_tokens_exceeded"),
    limits.NoSuchSession: (404, "session_not_found"),
    limits.TooManySessions: (429, "too_many_sessions"),
    limits.SessionTooLarge: (413, "session_too_large"),
    limits.BadState: (400, "bad_state"),
}
MEANINGS = {
    400: "The request cannot be carried out: malformed JSON, or a value beyond a limit of the server",
    401: "The API key is missing or wrong",
    403: "A page of another origin, or an unknown Host",
    404: "There is no such model, session, run or file",
    409: "The session is in use, or its state does not fit",
    413: "The request is too large",
    415: "The content type is not the documented one",
    422: "A field has a wrong type or value",
    429: "Too many requests wait, or there are too many sessions",
    500: "A fault of the server",
    503: "The server is stopping",
}


class ErrorBody(BaseModel):
    """What went wrong, in one line."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The form of every error."""

    error: ErrorBody


class ApiError(UserError):
    """An answer that is an error; its message is one line."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})

    def content(self) -> dict[str, Any]:
        """The answer as JSON values."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, default)
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The answer; characters beyond ASCII are escaped, so also a lone surrogate can be quoted."""
        body = json.dumps(self.content()).encode()
        return Response(body, self.status, headers=self.headers, media_type="application/json")


def api_error(problem: Exception) -> ApiError:
    """The answer for an exception of an engine or of sessions. Its traceback is not for the client."""
    if isinstance(problem, ApiError):
        return problem
    if not isinstance(problem, UserError):
        return ApiError(500, f"the server failed: {type(problem).__name__}", "internal_error")
    status, code = _REFUSALS.get(type(problem), (400, "invalid_value"))
    # Clients try again after that many seconds.
    return ApiError(
        status, str(problem), code, headers={"Retry-After": "1"} if status in (429, 503) else None
    )


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route, for its description."""
    found: dict[int | str, dict[str, Any]] = {}
    for status in sorted({*statuses, 401, 403, 500, 503}):
        found[status] = {"model": ErrorAnswer, "description": MEANINGS[status]}
        if status in (429, 503):
            found[status]["headers"] = {
                "Retry-After": {"description": "seconds", "schema": {"type": "integer"}}
            }
    return found


def add_handlers(app: FastAPI) -> None:
    """Exceptions of routes become answers of the common form."""
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    for kind in (UserError, Exception):
        app.add_exception_handler(kind, _problem)


async def _problem(request: Request, problem: Exception) -> Response:
    return api_error(problem).response()


async def _http(request: Request, problem: Exception) -> Response:
    """Of the framework: no such path, method not allowed, a body that cannot be parsed."""
    assert isinstance(problem, HTTPException)
    code = _CODES.get(problem.status_code, "invalid_request")
    return ApiError(problem.status_code, str(problem.detail), code, headers=problem.headers).response()


async def _invalid(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, RequestValidationError)
    return invalid_fields(problem.errors()).response()


def invalid_fields(found: Sequence[Mapping[str, Any]]) -> ApiError:
    """The error for values that do not fit the description of a request."""
    first = found[0]
    if first["type"] == "json_invalid":
        where = f"{first.get('ctx', {}).get('error', 'cannot be read')} at character {first['loc'][-1]}"
        return ApiError(400, f"the body is not valid JSON: {where}", "invalid_json")
    place = first["loc"][1:]  # after 'body', 'query' or 'path'
    param = str(place[0]) if place else None
    said = list(dict.fromkeys(one["msg"] for one in found if tuple(one["loc"][1:2]) == tuple(place[:1])))
    message = "; ".join(said[:4])
    return ApiError(422, f"{param or 'the body'}: {message}", "invalid_value", param)
