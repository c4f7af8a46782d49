"""Requests that are wrong in every way: a proper status, OpenAI's form, and the server lives on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from longspan.serving.http.gate import Rules
from longspan.serving.limits import Limits
from tests.serving.running import JSON, Client, real_service, running

BYTES = {"Content-Type": "application/octet-stream"}
VALUES: list[tuple[dict[str, Any], int, str | None]] = [  # fields, status, the field that the error names
    ({"prompt": 3}, 422, "prompt"),
    ({"prompt": {"a": 1}}, 422, "prompt"),
    ({"prompt": []}, 422, "prompt"),
    ({"prompt": [[]]}, 422, "prompt"),
    ({"prompt": [True]}, 422, "prompt"),
    ({"prompt": [1.5]}, 422, "prompt"),
    ({"prompt": ["a", 1]}, 422, "prompt"),
    ({"prompt": [-1]}, 422, "prompt"),
    ({"prompt": [10**30]}, 422, "prompt"),
    ({"prompt": [1, 256]}, 400, "prompt"),
    ({"prompt": [[1], [70000]]}, 400, "prompt"),
    ({"prompt": ["a"] * 129}, 422, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, 400, "n"),
    ({"prompt": "x" * 1001}, 400, None),
    ({"prompt": ["x" * 600, "y" * 600]}, 400, None),
    ({"model": None}, 422, "model"),
    ({"model": 3}, 422, "model"),
    ({"model": "../../etc/passwd"}, 404, "model"),
    ({"model": "tiny\n"}, 404, "model"),
    ({"max_tokens": -1}, 422, "max_tokens"),
    ({"max_tokens": 101}, 400, None),
    ({"max_tokens": 10**40}, 422, "max_tokens"),
    ({"max_tokens": "5"}, 422, "max_tokens"),
    ({"max_tokens": 1.5}, 422, "max_tokens"),
    ({"temperature": -0.1}, 422, "temperature"),
    ({"temperature": "warm"}, 422, "temperature"),
    ({"top_p": 0}, 422, "top_p"),
    ({"top_p": 1.5}, 422, "top_p"),
    ({"top_k": 0}, 422, "top_k"),
    ({"repetition_penalty": 0}, 422, "repetition_penalty"),
    ({"n": 0}, 422, "n"),
    ({"n": 129}, 422, "n"),
    ({"n": True}, 422, "n"),
    ({"seed": 2**63}, 422, "seed"),
    ({"seed": "one"}, 422, "seed"),
    ({"logprobs": 21}, 422, "logprobs"),
    ({"logprobs": -1}, 422, "logprobs"),
    ({"stop": ""}, 422, "stop"),
    ({"stop": ["a"] * 17}, 422, "stop"),
    ({"stop": ["x" * 1001]}, 422, "stop"),
    ({"stop": [["a"]]}, 422, "stop"),
    ({"stream": "yes"}, 422, "stream"),
    ({"stream_options": {"nothing": 1}}, 422, "stream_options"),
    ({"best_of": 3}, 422, "best_of"),
    ({"suffix": "end"}, 422, "suffix"),
    ({"presence_penalty": 0.5}, 422, "presence_penalty"),
    ({"logit_bias": {"50": 1}}, 422, "logit_bias"),
    ({"temprature": 1}, 422, "temprature"),
]
BODIES: list[tuple[bytes, int]] = [
    (b"", 422),
    (b"{", 400),
    (b"[1, 2]", 422),
    (b"null", 422),
    (b'"text"', 422),
    (b"\xff\xfe\x00", 400),
    (b'{"model": "tiny", "prompt": "\xff"}', 400),
    (b'{"model": "tiny", "prompt": "\\ud800"}', 422),
    (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 422),
    (b'{"model": "tiny", "prompt": "a", "temperature": Infinity}', 422),
    (b'{"model": "tiny", "prompt": "a", "top_p": -Infinity}', 422),
    (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', 422),
    (b'{"model": "tiny", "max_tokens": ' + b"9" * 5000 + b"}", 400),
    (b"[" * 100_000, 400),
    (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 400),
    (b'{"model": "tiny", "prompt": ' + b"[" * 900 + b"]" * 900 + b"}", 422),
    (b'{"model": "\\ud800"}', 422),
    (b'{"model": "tiny", "\\ud800": 1}', 422),
    (b"POST / HTTP/1.1", 400),
]


@pytest.fixture(scope="module")
def client() -> Any:
    limits = Limits(prompt_tokens=1000, generated_tokens=100, inspected_tokens=50)
    with running(real_service(limits), Rules(body_bytes=1 << 20, upload_bytes=1 << 16)) as (found, _):
        yield found


@pytest.fixture(autouse=True)
def _lives_on(client: Client) -> Any:
    yield
    assert client.complete("a", max_tokens=2).status == 200


@pytest.mark.parametrize(("fields", "status", "param"), VALUES, ids=lambda value: str(value)[:50])
def test_a_wrong_value(client: Client, fields: dict[str, Any], status: int, param: str | None) -> None:
    found = client.post("/v1/completions", {"model": "tiny", "prompt": "a", **fields})
    assert (found.status, found.json["error"]["param"]) == (status, param)
    assert found.code
    if param is not None and status == 422:
        assert param in found.json["error"]["message"]


@pytest.mark.parametrize(("body", "status"), BODIES, ids=lambda value: str(value)[:50])
def test_a_wrong_body(client: Client, body: bytes, status: int) -> None:
    found = client.ask("POST", "/v1/completions", body)
    assert found.status == status, found.body
    assert found.code


def test_negative_and_large_seeds_are_seeds(client: Client) -> None:
    for seed in (-(2**63), -1, 0, 2**63 - 1):
        texts = {client.complete("a", max_tokens=5, seed=seed, n=2).body.split(b'"choices"')[1] for _ in "ab"}
        assert len(texts) == 1


def test_a_body_that_is_too_large_is_not_read(client: Client) -> None:
    found = client.ask("POST", "/v1/completions", b" " * ((1 << 20) + 1))
    assert (found.status, found.code) == (413, "body_too_large")
    found = client.ask("POST", "/v1/sessions/load?model=tiny", bytes((1 << 16) + 1), BYTES)
    assert found.status == 413
    for size in ("99999999999999999999", "-1", "x"):
        found = client.ask("POST", "/v1/completions", None, {"Content-Length": size, **JSON})
        assert found.status in (400, 413)


def test_a_chunked_body_that_is_too_large(client: Client) -> None:
    """Its length is not known before."""
    import http.client

    connection = http.client.HTTPConnection(client.host, timeout=30)
    parts = (b" " * 65536 for _ in range(40))
    headers = {"Content-Type": "application/json"}
    try:
        connection.request("POST", "/v1/completions", parts, headers, encode_chunked=True)
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server closed the connection while we were still sending
    finally:
        connection.close()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "form/data"])
def test_another_content_type(client: Client, kind: str) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a"}).encode()
    found = client.ask("POST", "/v1/completions", body, {"Content-Type": kind})
    assert (found.status, found.code) == (415, "wrong_content_type")
    upload = client.ask("POST", "/v1/sessions/load?model=tiny", b"x", {"Content-Type": kind or "text/plain"})
    assert upload.status == 415


def test_texts_that_are_too_long(client: Client) -> None:
    long = "x" * 1001
    session = client.session()
    for path, body in (
        ("/v1/score", {"model": "tiny", "text": long}),
        ("/v1/score", {"model": "tiny", "texts": ["x" * 600] * 2}),
        ("/v1/inspect", {"model": "tiny", "text": "x" * 51}),
        ("/v1/sessions", {"model": "tiny", "text": long}),
        (f"/v1/sessions/{session}/append", {"text": long}),
    ):
        found = client.post(path, body)
        assert (found.status, found.code) == (400, "context_length_exceeded"), path


def test_score_needs_one_of_its_fields(client: Client) -> None:
    for fields in ({}, {"text": "a", "texts": ["b"]}, {"text": None}):
        assert client.post("/v1/score", {"model": "tiny", **fields}).status == 422


@pytest.mark.parametrize(
    "session", ["nothing", "..%2F..%2Fetc%2Fpasswd", "x" * 65, "%00", "a.b", "%F0%9F%98%80", "a%0Ab"]
)
def test_an_unknown_session(client: Client, session: str) -> None:
    status = 404 if session in ("nothing", "..%2F..%2Fetc%2Fpasswd") else 422
    for method, path, body in (
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/append", {"text": "a"}),
        ("POST", "/generate", {}),
        ("POST", "/fork", None),
        ("POST", "/save", None),
        ("GET", "/file", None),
    ):
        found = client.ask(method, f"/v1/sessions/{session}{path}", body)
        assert found.status == status, path
        assert found.code


def test_unknown_paths_and_methods(client: Client) -> None:
    assert client.get("/v1/nothing").code == "not_found"
    assert client.get("/v1/models/").status == 404
    found = client.ask("PUT", "/v1/completions", {})
    assert (found.status, found.code) == (405, "method_not_allowed")
    assert found.headers["allow"] == "POST"
    for path in (
        "/page/../../errors.py",
        "/page/%2e%2e/limits.py",
        "/page//etc/passwd",
        "/page/vendor/..%2f",
    ):
        assert client.get(path).status == 404
    assert client.get("/docs").status == 404
