"""The same run on a GPU: lower precisions, and resume bit for bit in deterministic mode."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan import recipes
from longspan.bench import Bench
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


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon", "normuon"])
def test_every_optimizer_moves_there(text: Path, tmp_path: Path, optimizer: str) -> None:
    config = small_config(text, training__device="cuda", stage__0__optimizer=optimizer)
    losses = [
        line["loss"] for line in metrics(train(config, tmp_path / "run").path) if line["kind"] == "train"
    ]
    assert losses[2] < losses[0]


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("optimizer", ["adagrad", "adamw", "muon", "normuon"])
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


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("kind", ["learned", "dynamic"])
def test_activation_checkpointing_changes_no_number(
    text: Path, tmp_path: Path, precision: str, kind: str
) -> None:
    changes = {"training__device": "cuda", "training__precision": precision, "model__span__kind": kind}
    train(small_config(text, **changes), tmp_path / "plain")
    train(small_config(text, **changes, training__activation_checkpointing=True), tmp_path / "less")
    assert outcome(tmp_path / "less") == outcome(tmp_path / "plain")


def test_activation_checkpointing_with_compiled_blocks(text: Path, tmp_path: Path) -> None:
    """Nothing is captured, and the losses are those of launched operations to rounding."""
    changes = {"training__device": "cuda", "training__block_jitter": False, "training__micro_batches": 1}
    less = {"training__compile": True, "training__activation_checkpointing": True}
    changes |= {"model__dropout": 0.0}
    plain = metrics(train(small_config(text, **changes), tmp_path / "plain").path)
    found = metrics(train(small_config(text, **changes, **less), tmp_path / "less").path)
    assert found[-1]["valid"]["loss"] == pytest.approx(plain[-1]["valid"]["loss"], rel=0.02)


@pytest.mark.parametrize("less", [False, True])
def test_the_memory_of_a_step_is_about_what_was_estimated(less: bool) -> None:
    """Of a model that is large enough for activations to matter."""
    table = recipes.load("enwik8-small")
    table["training"] |= {"compile": False, "activation_checkpointing": less}
    bench = Bench(schema.read(RunConfig, table), 205, torch.device("cuda"), say=lambda line: None)
    plan, steps = bench.time_steps(3)
    assert plan is not None
    assert steps.peak_memory_bytes == pytest.approx(plan.total, rel=0.4)
