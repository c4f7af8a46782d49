"""Servers for tests: one for a whole module, with the real engine, and one whose engine can be held."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from longspan.serving.http.service import Service
from tests.serving.fake import FakeEngine
from tests.serving.running import Client, fake_service, real_service, running


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server that several tests share."""
    folder = tmp_path_factory.mktemp("sessions")
    run = folder / "run"
    run.mkdir()
    (run / "config.toml").write_text('name = "watched"')
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 3, "loss": 1.5, "tokens": 9}\n')
    with running(real_service(runs={"watched": run}, folder=folder)) as (found, _):
        yield found


@pytest.fixture
def held() -> Iterator[tuple[Client, FakeEngine, Service]]:
    """A server of one test; its engine waits while `gate` is cleared."""
    service = fake_service()
    engine = service.models["tiny"].engine
    assert isinstance(engine, FakeEngine)
    with running(service) as (found, _):
        yield found, engine, service
        engine.gate.set()
