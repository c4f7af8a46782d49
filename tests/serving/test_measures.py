"""Scores, inspection, runs, metrics and the page."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from longspan.inspection.surprise import Totals, inspect_blocks
from longspan.language_model import LoadedModel
from tests.serving.running import Client, tiny_lm

TEXT = "caf\u00e9 and more"


@pytest.fixture(scope="module")
def lm() -> LoadedModel:
    return tiny_lm()


def test_score(client: Client, lm: LoadedModel) -> None:
    found = client.post("/v1/score", {"model": "tiny", "texts": [TEXT, "", "b"]}).json
    assert (found["object"], found["model"], len(found["data"])) == ("list", "tiny", 3)
    first, empty, _ = found["data"]
    wanted = lm.score(TEXT)
    assert first["tokens"] == list(wanted.ids)
    assert first["pieces"][3:5] == ["\\xc3", "\\xa9"]
    assert first["bytes"] == wanted.bytes == 14
    assert first["bits"] == pytest.approx(wanted.nats / math.log(2), rel=1e-4)
    assert first["bits_per_byte"] == pytest.approx(wanted.bits_per_byte, rel=1e-4)
    assert math.fsum(first["token_bits"]) == pytest.approx(first["bits"])
    assert (empty["tokens"], empty["bits"], empty["bits_per_byte"]) == ([], 0, None)
    assert client.post("/v1/score", {"model": "tiny", "text": TEXT}).json["data"] == [first]


def test_inspect(client: Client, lm: LoadedModel) -> None:
    found = client.post("/v1/inspect", {"model": "tiny", "text": TEXT}).json
    ids = np.frombuffer(TEXT.encode(), dtype=np.uint8)
    (wanted,) = inspect_blocks(lm.model, [ids], lm.read(""), Totals())
    assert [one["bits"] for one in found["tokens"]] == pytest.approx(wanted.bits, rel=1e-4)
    assert found["tokens"][0]["text"] == "c"
    assert [one["name"] for one in found["layers"]] == [one.name for one in wanted.layers]
    for layer, other in zip(found["layers"], wanted.layers, strict=True):
        assert np.array(layer["mean_distance"]) == pytest.approx(other.mean_HT.numpy(), rel=1e-3)
        assert np.array(layer["reach"]).shape == (2, 14)
    nothing = client.post("/v1/inspect", {"model": "tiny", "text": ""}).json
    assert (nothing["tokens"], nothing["layers"]) == ([], [])


def test_runs(client: Client) -> None:
    listed = client.get("/v1/runs").json
    assert listed == {"object": "list", "data": [{"name": "watched", "object": "run", "model": None}]}
    found = client.get("/v1/runs/watched").json
    assert (found["name"], found["folder"], found["step"]) == ("watched", "watched", 3)
    assert found["curves"]["train"] == [{"step": 3, "loss": 1.5, "tokens": 9}]
    for name in ("other", "..", "%2e%2e", "watched%2f..", "%00"):
        assert client.get(f"/v1/runs/{name}").status == 404


def test_metrics(client: Client) -> None:
    before = _numbers(client)
    assert client.complete("hello", max_tokens=7, stream=True).status == 200
    assert client.get("/v1/nothing").status == 404
    session = client.session("some text")
    after = _numbers(client)

    def more(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert more('longspan_requests_total{route="/v1/completions",status="200"}') == 1
    assert more('longspan_requests_total{route="other",status="404"}') == 1
    assert more('longspan_tokens_generated_total{model="tiny"}') == 7
    assert more('longspan_tokens_read_total{model="tiny"}') >= 14
    assert more("longspan_first_token_seconds_count") == 1
    assert more("longspan_between_tokens_seconds_count") <= 6
    assert more("longspan_sessions") == 1
    assert more("longspan_session_bytes") > 0
    assert after['longspan_running{model="tiny"}'] == after['longspan_waiting{model="tiny"}'] == 0
    assert after['longspan_slots{model="tiny"}'] == 32
    client.ask("DELETE", f"/v1/sessions/{session}")


def _numbers(client: Client) -> dict[str, float]:
    found = client.get("/metrics")
    assert found.headers["content-type"].startswith("text/plain; version=")
    return {name: float(value) for name, value in re.findall(r"^(\w\S*) (\S+)$", found.body.decode(), re.M)}
