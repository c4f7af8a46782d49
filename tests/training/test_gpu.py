"""The same run on a GPU: lower precisions, and resume bit for bit in deterministic mode."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longspan.training import Interrupted, resume, train

from .runs import Signals, metrics, outcome, small_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(text: Path, tmp_path: Path, precision: str) -> None:
    config = small_config(text, training__device="cuda", training__precision=precision)
    train(config, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", reporter=Signals("train step 17 ", signal.SIGINT))
    resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_every_optimizer_moves_there(text: Path, tmp_path: Path, optimizer: str) -> None:
    config = small_config(text, training__device="cuda", stage__0__optimizer=optimizer)
    losses = [
        line["loss"] for line in metrics(train(config, tmp_path / "run").path) if line["kind"] == "train"
    ]
    assert losses[2] < losses[0]
