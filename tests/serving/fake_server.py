"""A server with the fake engine, to try things by hand: python -m tests.serving.fake_server RUN [PORT]."""

from __future__ import annotations

import sys
from pathlib import Path

from longspan.language_model import load
from longspan.serving.http.gate import Rules
from longspan.serving.http.server import address, bind, serve
from longspan.serving.http.service import Served, Service
from longspan.serving.limits import Limits
from tests.serving.fake import FakeEngine, FakeSessions


def main(run: str, port: str = "0") -> None:
    lm, limits = load(run), Limits()
    name = Path(run).resolve().name
    service = Service(
        {name: Served(name, lm, FakeEngine(lm, name, limits))},  # type: ignore[arg-type]
        FakeSessions(limits),  # type: ignore[arg-type]
        limits,
        {name: Path(run)},
    )
    listening = bind("127.0.0.1", int(port))
    serve(service, Rules(), listening, 2.0, lambda: print(address(listening), flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
