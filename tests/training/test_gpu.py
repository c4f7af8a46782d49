"""The same run on a GPU: lower precisions, and resume bit for bit in deterministic mode."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.config import RunConfig, schema
from longspan.training import Interrupted, resume, train
from longspan.training.step import Updater

from .runs import Signals, metrics, outcome, small_config, small_table

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


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_compile_warmup_leaves_no_trace(text: Path, tmp_path: Path, precision: str) -> None:
    """The graphs captured in steps that are rolled back serve the steps that count."""
    changes = {
        "training__device": "cuda",
        "training__precision": precision,
        "training__micro_batches": 1,
        "training__block_jitter": False,
    }
    train(small_config(text, **changes), tmp_path / "plain")
    train(small_config(text, **changes, training__compile_warmup=6), tmp_path / "warm")
    assert outcome(tmp_path / "warm") == outcome(tmp_path / "plain")


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_every_optimizer_moves_there(text: Path, tmp_path: Path, optimizer: str) -> None:
    config = small_config(text, training__device="cuda", stage__0__optimizer=optimizer)
    losses = [
        line["loss"] for line in metrics(train(config, tmp_path / "run").path) if line["kind"] == "train"
    ]
    assert losses[2] < losses[0]


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("optimizer", ["adagrad", "adamw", "muon"])
def test_stages_with_one_optimizer_are_one_stage_there_too(
    text: Path, tmp_path: Path, optimizer: str
) -> None:
    table = small_table(text)
    table["training"]["device"] = "cuda"
    final = []
    for cuts in ([13], [5, 8]):
        table["stage"] = [{"optimizer": optimizer, "learning_rate": 0.01, "steps": steps} for steps in cuts]
        run = train(schema.read(RunConfig, table), tmp_path / str(len(cuts)))
        final.append(metrics(run.path)[-1]["valid"]["nats"])
    assert final[0] == final[1]


def test_time_on_the_device_counts(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that the device works on long after it was started: its time is in the lines all the same."""
    update = Updater.update

    def slow(*args: Any, **kwargs: Any) -> Any:
        torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
        return update(*args, **kwargs)

    monkeypatch.setattr(Updater, "update", slow)
    config = small_config(text, training__device="cuda", model__span__kind="fixed", stage__0__steps=14)
    first, second = metrics(train(config, tmp_path / "run").path)[:2]
    assert second["seconds"] - first["seconds"] > 7 * 0.08
