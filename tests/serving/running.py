"""A real server on this machine, in a thread of the test, and a plain client."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspan.config import RunConfig
from longspan.data import Tokenizer
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.language_model import LoadedModel
from longspan.serving.engine import Engine
from longspan.serving.http.gate import Rules
from longspan.serving.http.server import Server, address, bind
from longspan.serving.http.service import Served, Service
from longspan.serving.limits import Limits
from longspan.serving.sessions import Sessions
from tests.serving.fake import FakeEngine
from tests.using.tiny import MODEL, tiny_model

JSON = {"Content-Type": "application/json"}


def tiny_lm(tokenizer: Tokenizer | None = None) -> LoadedModel:
    """A model that was never trained."""
    tokenizer = tokenizer or ByteTokenizer()
    config, model = RunConfig(name="tiny", model=MODEL), tiny_model(tokenizer.vocabulary_size)
    return LoadedModel(model, tokenizer, config, torch.device("cpu"), Path("tiny"))


def real_service(
    limits: Limits | None = None, runs: Mapping[str, Path] | None = None, folder: Path | None = None
) -> Service:
    """A service with a small model; saved sessions go to `folder`."""
    lm, limits = tiny_lm(), limits or Limits()
    engine = Engine(lm, "tiny", limits)
    return Service(
        {"tiny": Served("tiny", lm, engine)}, Sessions({"tiny": lm}, limits, folder), limits, runs or {}
    )


def fake_service(limits: Limits | None = None) -> Service:
    """The same with an engine that a test can hold."""
    lm, limits = tiny_lm(), limits or Limits()
    served = Served("tiny", lm, FakeEngine(lm, "tiny", limits))  # type: ignore[arg-type]
    return Service({"tiny": served}, Sessions({"tiny": lm}, limits), limits)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of an error, whose form is checked."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert "\n" not in error["message"]
        return str(error["code"])

    @property
    def events(self) -> list[Any]:
        """Of a stream that ended properly."""
        lines = [line for line in self.body.decode().split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]

    @property
    def text(self) -> str:
        """The text of all events, or of the only choice."""
        found = self.events if self.body.startswith(b"data: ") else [self.json]
        return "".join(choice["text"] for event in found for choice in event["choices"])


class Client:
    """One connection for each request."""

    def __init__(self, where: str, headers: Mapping[str, str] | None = None) -> None:
        self.url, self.host = where, where.removeprefix("http://")
        self._headers = dict(headers or {})

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Bytes are sent as they are, all else as JSON."""
        connection = http.client.HTTPConnection(self.host, timeout=30)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = JSON if data is not None else {}
        try:
            connection.request(method, path, data, {**kind, **self._headers, **(headers or {})})
            found = connection.getresponse()
            return Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, headers=headers)

    def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return self.ask("POST", path, body, headers)

    def complete(self, prompt: Any = "hello", **more: Any) -> Answer:
        return self.post("/v1/completions", {"model": "tiny", "prompt": prompt, **more})

    def session(self, text: str = "") -> str:
        """The id of a new session."""
        return str(self.post("/v1/sessions", {"model": "tiny", "text": text}).json["id"])


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def running(
    service: Service, rules: Rules | None = None, grace: float = 2.0
) -> Iterator[tuple[Client, Server]]:
    """The server, until the block ends."""
    ready, listening = threading.Event(), bind("127.0.0.1", 0)
    server = Server(service, rules or Rules(), grace, ready.set)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield Client(address(listening)), server
    finally:
        if not server.should_exit:
            server.stop()
        thread.join(20)
        assert not thread.is_alive()
