"""Clients that leave, queues that are full, engines that fail, and the end of a server."""

from __future__ import annotations

import json
import resource
import select
import socket
import threading
import time
from typing import Any

import pytest

from longspan.serving.http.gate import Rules
from longspan.serving.http.service import Service
from longspan.serving.limits import Limits
from tests.serving.fake import FakeEngine
from tests.serving.running import Answer, Client, fake_service, real_service, running, wait_until

Held = tuple[Client, FakeEngine, Service]


def send(client: Client, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection with a request on it, for a client that does not wait for the answer."""
    host, port = client.host.split(":")
    data = json.dumps(body).encode()
    found = socket.create_connection((host, int(port)), timeout=20)
    found.sendall(
        f"POST {path} HTTP/1.1\r\nHost: {client.host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return found


@pytest.mark.parametrize("more", [{"stream": True}, {}, {"n": 3}, {"n": 2, "stream": True}])
def test_a_client_that_leaves_cancels_its_jobs(held: Held, more: dict[str, Any]) -> None:
    client, engine, _ = held
    connection = send(client, "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 9000, **more})
    count = more.get("n", 1)
    wait_until(lambda: len(engine.jobs) >= count + (count > 1))
    if more == {"stream": True}:
        assert b"200 OK" in connection.recv(1000)
    connection.close()
    wait_until(lambda: all(job.cancelled.is_set() for job in engine.jobs[-count:]))
    assert client.complete("b", max_tokens=2).status == 200


def test_a_client_that_leaves_keeps_its_session(held: Held) -> None:
    client, engine, service = held
    session = client.session("some text")
    engine.gate.clear()
    connection = send(client, f"/v1/sessions/{session}/generate", {"max_tokens": 5000})
    wait_until(lambda: session in service._in_use)
    connection.close()
    wait_until(lambda: session not in service._in_use)
    engine.gate.set()
    assert client.get(f"/v1/sessions/{session}").json["tokens"] == 9
    assert client.post(f"/v1/sessions/{session}/generate", {"max_tokens": 2}).status == 200


def test_half_a_request_is_nothing(client: Client) -> None:
    connection = send(client, "/v1/completions", {"model": "tiny"})
    connection.close()
    host, port = client.host.split(":")
    with socket.create_connection((host, int(port))) as part:
        part.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n")
        part.sendall(b'Content-Type: application/json\r\n\r\n{"model"')
    assert client.complete("b", max_tokens=2).status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue(stream: bool) -> None:
    service = fake_service(Limits(waiting=2))
    engine = service.models["tiny"].engine
    assert isinstance(engine, FakeEngine)
    with running(service) as (client, _):
        engine.gate.clear()
        kept = [send(client, "/v1/completions", {"model": "tiny", "max_tokens": 3})]
        wait_until(lambda: engine.stats.running == 1)
        kept += [send(client, "/v1/completions", {"model": "tiny", "max_tokens": 3}) for _ in range(2)]
        wait_until(lambda: engine.stats.waiting == 2)
        found = client.complete("b", stream=stream)
        assert (found.status, found.code) == (429, "queue_full")
        assert found.headers["retry-after"] == "1"
        assert client.post("/v1/score", {"model": "tiny", "text": "a"}).status == 429
        engine.gate.set()
        for connection in kept:
            assert b"200 OK" in connection.recv(1000)
            connection.close()


def test_choices_that_do_not_all_fit_are_all_cancelled() -> None:
    service = fake_service(Limits(waiting=3))
    engine = service.models["tiny"].engine
    assert isinstance(engine, FakeEngine)
    with running(service) as (client, _):
        engine.gate.clear()
        found = client.complete(["a", "b", "c", "d", "e", "f"])
        assert (found.status, found.code) == (429, "queue_full")
        assert all(job.cancelled.is_set() for job in engine.jobs)
        engine.gate.set()
        wait_until(lambda: engine.stats.waiting == 0)


def test_a_thousand_requests_at_once() -> None:
    """Some are served, all others are told to come back. Both ends of each connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2500:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2500, hard))
    with running(real_service(Limits(waiting=20))) as (client, _):
        connections = [
            send(client, "/v1/completions", {"model": "tiny", "max_tokens": 3, "stream": number % 2 == 0})
            for number in range(1000)
        ]
        statuses: dict[bytes, int] = {}
        for connection in connections:
            status = connection.recv(100).split()[1]
            statuses[status] = statuses.get(status, 0) + 1
            connection.close()
        assert set(statuses) == {b"200", b"429"}
        assert statuses[b"200"] >= 20
        assert client.complete("b", max_tokens=2).status == 200
        assert client.get("/metrics").status == 200


def test_bodies_share_a_limit() -> None:
    """Clients that send large bodies slowly: what is in memory is limited, and given back."""
    with running(fake_service(), Rules(body_bytes=1 << 20, all_bytes=1 << 21)) as (client, _):
        host, port = client.host.split(":")
        slow = [socket.create_connection((host, int(port)), timeout=20) for _ in range(4)]
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for connection in slow:
            connection.sendall(f"{head}Content-Length: {1 << 20}\r\n\r\n".encode() + b" " * ((1 << 20) - 1))
        wait_until(lambda: len(select.select(slow, [], [], 1)[0]) == 2)
        for connection in select.select(slow, [], [], 1)[0]:
            assert b"429" in connection.recv(20)
        for connection in slow:
            connection.close()
        wait_until(lambda: client.complete(" " * 900_000).code == "context_length_exceeded")


def test_an_engine_that_fails(held: Held) -> None:
    client, engine, _ = held
    engine.fault = RuntimeError("device lost")
    for stream in (True, False):  # before the first token a stream has a status of its own
        found = client.complete("b", stream=stream)
        assert (found.status, found.code) == (500, "generation_failed")
    engine.fault = None
    assert client.complete("b").status == 200


def test_an_engine_that_fails_midway(held: Held) -> None:
    client, engine, _ = held
    connection = send(client, "/v1/completions", {"model": "tiny", "max_tokens": 16000, "stream": True})
    assert b"200 OK" in connection.recv(200)
    engine.fault = RuntimeError("device lost")
    whole = b""
    while part := connection.recv(1 << 16):
        whole += part
        if b"[DONE]" in whole:
            break
    connection.close()
    *_, error, done = [line for line in whole.split(b"\n") if line.startswith(b"data: ")]
    assert done == b"data: [DONE]"
    assert json.loads(error[6:])["error"]["code"] == "generation_failed"


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_within_the_grace_finishes(stream: bool) -> None:
    service, answers = fake_service(), list[Answer]()
    engine = service.models["tiny"].engine
    assert isinstance(engine, FakeEngine)
    with running(service, grace=10) as (client, server):
        engine.gate.clear()
        asking = threading.Thread(
            target=lambda: answers.append(client.complete("a", max_tokens=20, seed=1, stream=stream))
        )
        asking.start()
        wait_until(lambda: engine.stats.running == 1)
        server.stop()
        time.sleep(0.3)
        engine.gate.set()
        asking.join(20)
    wanted = service.models["tiny"].lm.generate("a", 20, 1.0, seed=1)
    assert answers[0].text == wanted


def test_a_stop_after_the_grace_ends_streams_properly() -> None:
    service, answers = fake_service(), list[Answer]()
    began = time.monotonic()
    with running(service, grace=0.2) as (client, server):
        asking = threading.Thread(
            target=lambda: answers.append(client.complete("a", max_tokens=16000, stream=True))
        )
        asking.start()
        engine = service.models["tiny"].engine
        wait_until(lambda: engine.stats.tokens_generated > 3)
        server.stop()
        asking.join(20)
    assert time.monotonic() - began < 15
    *texts, last = answers[0].events
    assert texts
    assert last["error"]["code"] == "server_stopping"


def test_while_it_stops_it_is_not_ready(held: Held) -> None:
    client, _, service = held
    service.stopping = True
    found = client.get("/ready")
    assert (found.status, found.code) == (503, "server_stopping")
    assert found.headers["retry-after"] == "1"
    assert client.get("/health").status == 200
