"""What every request passes first: allowed hosts and origins, the API key, the size and type of the body.

It is plain ASGI: nothing is added to the work for each token.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longspan.serving.http.bodies import Bodies, replayed, too_large
from longspan.serving.http.errors import ApiError

LOCAL = ("localhost", "127.0.0.1", "::1")
OPEN_PATHS = ("/", "/health", "/ready")  # and the files of the page: they need no key
UPLOAD = "/v1/sessions/load"
BINARY = "application/octet-stream"
DIRECT = "longspan.send"  # in the scope: the server's own `send`, without the layers of the framework


@dataclass(frozen=True)
class Rules:
    """Who may ask, and how much."""

    hosts: Collection[str] | None = LOCAL  # in the header Host; None: any
    origins: Collection[str] = ()  # of other pages that may ask
    key: bytes | None = None
    body_bytes: int = 1 << 22
    upload_bytes: int = 1 << 28
    all_bytes: int = 1 << 29  # of all bodies at once


class Gate:
    """The outermost application. `count` gets the route, the status and the seconds of every request."""

    def __init__(self, app: ASGIApp, rules: Rules, count: Callable[[str, int, float], None]) -> None:
        self._app, self._rules, self._count = app, rules, count
        self._bodies = Bodies(rules.all_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:  # there are no web sockets
            await send({"type": "websocket.close", "code": 1000})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.perf_counter(), 500

        async def send_safely(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(raw=message["headers"]).setdefault("X-Content-Type-Options", "nosniff")
            await send(message)

        scope[DIRECT] = send
        try:
            most = self._admit(scope)
            if most is None:
                await self._app(scope, receive, send_safely)
            else:
                await self._with_body(scope, receive, send_safely, most)
        except ApiError as problem:  # refused here; those of routes are answered inside
            await problem.response()(scope, receive, send_safely)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._count(route, status, time.perf_counter() - began)

    async def _with_body(self, scope: Scope, receive: Receive, send: Send, most: int) -> None:
        body = self._bodies.begin(most)
        try:
            read = await body.read(receive)
            if read is not None:
                await self._app(scope, replayed(read, receive), send)
        finally:
            body.end()

    def _admit(self, scope: Scope) -> int | None:
        """Check what is known before the body; returns how large that may be, None if it is not read."""
        headers, rules, path = Headers(scope=scope), self._rules, scope["path"]
        self._check_host(headers)
        if rules.key is not None and not _is_open(path):
            _check_key(headers, rules.key)
        if scope["method"] not in ("POST", "PUT", "PATCH"):
            return None
        _check_content_type(headers, BINARY if path == UPLOAD else "application/json")
        most = rules.upload_bytes if path == UPLOAD else rules.body_bytes
        size = headers.get("content-length", "0")
        if not (size.isascii() and size.isdigit() and len(size) < 20) or int(size) > most:
            raise too_large(most)
        return most

    def _check_host(self, headers: Headers) -> None:
        """Other pages in the user's browser may not ask, nor under a name of theirs for this address."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._rules.hosts is not None and _name(host) not in self._rules.hosts:
            raise ApiError(403, "this Host is not served: use localhost, or start with --host", "wrong_host")
        if origin is None or origin in self._rules.origins or "*" in self._rules.origins:
            return
        if urlsplit_or_none(origin) != host.lower():
            raise ApiError(403, "pages of this Origin may not ask: start with --allow-origin", "wrong_origin")


def urlsplit_or_none(origin: str) -> str | None:
    """Host and port of an origin."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _name(host: str) -> str:
    """A host without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/page/")


def _check_key(headers: Headers, key: bytes) -> None:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    # Bytes, because compare_digest takes only ASCII texts.
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1", "replace"), key):
        raise ApiError(
            401,
            "the API key is missing or wrong: send 'Authorization: Bearer KEY'",
            "invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _check_content_type(headers: Headers, wanted: str) -> None:
    """Browsers send other types to foreign servers without asking them first."""
    empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
    given = headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != wanted and not (empty and not given):
        raise ApiError(415, f"the content type must be {wanted}", "wrong_content_type")
