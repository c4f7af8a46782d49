"""Sessions over HTTP: states that stay on the server."""

from __future__ import annotations

import threading

import pytest

from longspan.language_model import LoadedModel
from longspan.serving.http.service import Service
from longspan.serving.limits import Limits
from tests.serving.fake import FakeEngine
from tests.serving.running import Client, real_service, running, tiny_lm, wait_until

FIELDS = {
    "id",
    "object",
    "model",
    "tokens",
    "text_tail",
    "created",
    "last_used",
    "saved",
    "in_memory",
    "bytes",
}
Held = tuple[Client, FakeEngine, Service]


@pytest.fixture(scope="module")
def lm() -> LoadedModel:
    return tiny_lm()


def test_a_text_in_pieces_is_the_text_at_once(client: Client, lm: LoadedModel) -> None:
    session = client.post("/v1/sessions", {"model": "tiny", "text": "the cat "}).json
    assert set(session) == FIELDS
    assert (session["object"], session["model"], session["tokens"]) == ("session", "tiny", 8)
    assert not session["saved"]
    place = f"/v1/sessions/{session['id']}"
    assert client.post(f"{place}/append", {"text": "sat on"}).json["tokens"] == 14
    done = client.post(f"{place}/generate", {"max_tokens": 7, "seed": 3}).json
    wanted = lm.generate("the cat sat on", 7, 1.0, seed=3)
    assert done["choices"][0]["text"] == wanted
    assert done["session"] == session["id"]
    assert client.get(place).json["tokens"] == 21
    again = client.post(f"{place}/generate", {"max_tokens": 7, "seed": 4, "stream": True})
    assert again.text == lm.generate("", 7, 1.0, seed=4, state=wanted.state)
    assert all(event["session"] == session["id"] for event in again.events)
    assert client.get(place).json["tokens"] == 28


def test_a_fork_continues_on_its_own(client: Client, lm: LoadedModel) -> None:
    first = client.session("once upon ")
    second = client.post(f"/v1/sessions/{first}/fork").json["id"]
    assert first != second
    client.post(f"/v1/sessions/{first}/append", {"text": "a time"})
    done = client.post(f"/v1/sessions/{second}/generate", {"max_tokens": 5, "seed": 1})
    assert done.text == lm.generate("once upon ", 5, 1.0, seed=1)
    done = client.post(f"/v1/sessions/{first}/generate", {"max_tokens": 5, "seed": 1})
    assert done.text == lm.generate("once upon a time", 5, 1.0, seed=1)


def test_a_session_without_text_starts_a_line(client: Client, lm: LoadedModel) -> None:
    done = client.post(f"/v1/sessions/{client.session()}/generate", {"max_tokens": 5, "seed": 1})
    assert done.text == lm.generate("", 5, 1.0, seed=1)


def test_list_and_delete(client: Client) -> None:
    session = client.session("gone soon")
    listed = client.get("/v1/sessions").json
    assert listed["object"] == "list"
    assert session in [one["id"] for one in listed["data"]]
    done = client.ask("DELETE", f"/v1/sessions/{session}")
    assert done.json == {"id": session, "object": "session", "deleted": True}
    assert session not in [one["id"] for one in client.get("/v1/sessions").json["data"]]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/fork"), ("POST", "/save"), ("GET", "/file")):
        found = client.ask(method, f"/v1/sessions/{session}{path}")
        assert (found.status, found.code) == (404, "session_not_found")


def test_save_download_and_upload(client: Client, lm: LoadedModel) -> None:
    session = client.session("kept text")
    assert client.post(f"/v1/sessions/{session}/save").json["saved"]
    file = client.get(f"/v1/sessions/{session}/file")
    assert file.headers["content-type"] == "application/octet-stream"
    assert file.headers["content-disposition"] == f'attachment; filename="{session}.safetensors"'
    loaded = client.ask(
        "POST", "/v1/sessions/load?model=tiny", file.body, {"Content-Type": "application/octet-stream"}
    )
    assert loaded.json["tokens"] == 9
    assert loaded.json["id"] != session
    done = client.post(f"/v1/sessions/{loaded.json['id']}/generate", {"max_tokens": 5, "seed": 1})
    assert done.text == lm.generate("kept text", 5, 1.0, seed=1)


def test_two_generations_on_one_session(held: Held) -> None:
    """The second one is refused, and so is everything else that changes the session; a fork is not."""
    client, engine, service = held
    session = client.session("x")
    place, answers = f"/v1/sessions/{session}", []
    engine.gate.clear()
    first = threading.Thread(
        target=lambda: answers.append(client.post(f"{place}/generate", {"max_tokens": 4, "seed": 1}))
    )
    first.start()
    wait_until(lambda: session in service._in_use)
    for method, path, body in (
        ("POST", "/generate", {"stream": True}),
        ("POST", "/append", {"text": "a"}),
        ("DELETE", "", None),
    ):
        found = client.ask(method, f"{place}{path}", body)
        assert (found.status, found.code) == (409, "session_in_use")
    assert client.post(f"{place}/fork").status == 200
    engine.gate.set()
    first.join(20)
    assert answers[0].status == 200
    assert client.post(f"{place}/generate", {"max_tokens": 2}).status == 200


def test_too_many_sessions() -> None:
    with running(real_service(Limits(sessions=2))) as (client, _):
        first, _ = client.session(), client.session()
        found = client.post("/v1/sessions", {"model": "tiny"})
        assert (found.status, found.code) == (429, "too_many_sessions")
        assert client.post(f"/v1/sessions/{first}/fork").status == 429
        client.ask("DELETE", f"/v1/sessions/{first}")
        assert client.post("/v1/sessions", {"model": "tiny"}).status == 200
