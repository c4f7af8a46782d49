"""Many sessions in little memory, and states that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from longspan.config import RunConfig
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.language_model import LoadedModel
from longspan.serving.engine import Engine
from longspan.serving.http.service import Served, Service
from longspan.serving.limits import Limits
from longspan.serving.sessions import Sessions
from tests.serving.running import Client, real_service, running
from tests.using.tiny import MODEL, tiny_model

BYTES = {"Content-Type": "application/octet-stream"}


def upload(client: Client, data: bytes, model: str = "tiny") -> tuple[int, str]:
    found = client.ask("POST", f"/v1/sessions/load?model={model}", data, BYTES)
    return found.status, found.code if found.status != 200 else ""


def test_forks_share_and_memory_stays_within_its_limit(tmp_path: Path) -> None:
    """200 forks of one prompt weigh as much as one. When they diverge, some go to disk and come back."""
    with running(real_service(folder=tmp_path / "first")) as (client, _):
        one = client.get(f"/v1/sessions/{client.session('x' * 500)}").json["bytes"]
    room = 10 * one
    service = real_service(Limits(sessions=201, session_bytes=room), folder=tmp_path / "sessions")
    with running(service) as (client, _):
        first = client.session("x" * 500)
        forks = [client.post(f"/v1/sessions/{first}/fork").json["id"] for _ in range(200)]
        assert service.sessions.memory_bytes == one
        assert client.post(f"/v1/sessions/{first}/fork").status == 429
        texts = []
        for number in range(30):
            done = client.post(
                f"/v1/sessions/{forks[number]}/generate", {"max_tokens": 3, "seed": number % 3}
            )
            texts.append(done.text)
            assert one <= service.sessions.memory_bytes <= room
        assert texts == texts[:3] * 10
        assert len(set(texts)) == 3
        shown = client.get("/v1/sessions").json["data"]
        assert len(shown) == 201
        assert sum(not session["in_memory"] for session in shown) >= 20
        again = {"max_tokens": 4, "seed": 9}
        for pair in ((0, 6), (3, 9), (27, 24)):  # with the same seed before; at first they are on disk
            one_text, other = (
                client.post(f"/v1/sessions/{forks[number]}/generate", again).text for number in pair
            )
            assert one_text == other


def test_a_session_that_is_larger_than_the_memory() -> None:
    with running(real_service(Limits(session_bytes=100))) as (client, _):
        found = client.post("/v1/sessions", {"model": "tiny", "text": "some text"})
        assert (found.status, found.code) == (413, "session_too_large")


@pytest.fixture(scope="module")
def exported(client: Client) -> bytes:
    return client.get(f"/v1/sessions/{client.session('some text')}/file").body


@pytest.mark.parametrize("where", [0, 5, 40, -1, -200])
def test_a_damaged_file(client: Client, exported: bytes, where: int) -> None:
    data = bytearray(exported)
    data[where] ^= 0xFF
    assert upload(client, bytes(data)) == (400, "bad_state")


@pytest.mark.parametrize(
    "data", [b"", b"x", bytes(8), b"\xff" * 100, b"PK\x03\x04" + bytes(50), b"\x80\x04."]
)
def test_bytes_that_are_no_state(client: Client, data: bytes) -> None:
    assert upload(client, data) == (400, "bad_state")


def test_a_cut_file_and_other_tensors(client: Client, exported: bytes) -> None:
    for size in (10, len(exported) // 2, len(exported) - 1):
        assert upload(client, exported[:size]) == (400, "bad_state")
    assert upload(client, exported + b"x") == (400, "bad_state")
    assert upload(client, save({"a": torch.zeros(3)})) == (400, "bad_state")
    tensors = {name: torch.full_like(value, 3) for name, value in load(exported).items()}
    assert upload(client, save(tensors)) == (400, "bad_state")
    assert upload(client, exported) == (200, "")


def test_a_state_of_another_model(client: Client, exported: bytes) -> None:
    torch.manual_seed(1)
    model = tiny_model()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    lm = LoadedModel(
        model, ByteTokenizer(), RunConfig(name="o", model=MODEL), torch.device("cpu"), Path("other")
    )
    limits = Limits()
    models = {"other": Served("other", lm, Engine(lm, "other", limits))}
    with running(Service(models, Sessions({"other": lm}, limits), limits)) as (other, _):
        assert upload(other, exported, "other") == (400, "bad_state")
        assert upload(other, exported, "tiny") == (404, "model_not_found")
