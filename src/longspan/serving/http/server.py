"""Running the application: one address, and a graceful stop."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from longspan.errors import UserError
from longspan.serving.http.app import make_app
from longspan.serving.http.gate import Rules
from longspan.serving.http.service import Service

_MARGIN = 5.0  # seconds for streams to write their last event after the engines have ended


def bind(host: str, port: int) -> socket.socket:
    """An open socket; port 0 means any free one. Models take long to load, so this comes first."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:  # the second: it can be no name of a host
        raise UserError(f"cannot listen on host {host!r}: {getattr(problem, 'strerror', problem)}") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as problem:
        found.close()
        raise UserError(
            f"cannot listen on {host}, port {port}: {problem.strerror or problem}; choose another --port"
        ) from None
    return found


def address(listening: socket.socket) -> str:
    """The address to type into a browser."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def serve(
    service: Service,
    rules: Rules,
    listening: socket.socket,
    grace: float,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGINT or SIGTERM; then what runs has `grace` seconds to finish."""
    Server(service, rules, grace, ready).run([listening])


class Server(uvicorn.Server):
    """A signal, or `stop`, stops the engines first; a second SIGINT does not wait for them."""

    def __init__(
        self, service: Service, rules: Rules, grace: float, ready: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service, rules),
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=math.ceil(grace + _MARGIN),
            )
        )
        self._service, self._grace, self._ready = service, grace, ready

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        for served in self._service.models.values():
            served.engine.start()
        try:
            asyncio.run(self.serve(sockets))
        finally:
            self._service.stop(0)

    def stop(self) -> None:
        """Begin to stop; may be called from another thread."""
        self.handle_exit(signal.SIGTERM, None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self._service.stop(self._grace)
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal is not raised again at the end: the stop was orderly."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        kept = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)
