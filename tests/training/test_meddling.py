"""A stopped run that somebody, or a crash, has changed: it goes on, or one line says why it cannot."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longspan.errors import UserError
from longspan.runs import RunFolder, checkpoint
from longspan.training import Interrupted, resume, train

from .runs import Lines, Signals, outcome, small_config


@pytest.fixture(scope="module")
def stopped(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in its second stage: never changed itself, only copied."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Interrupted):
        train(small_config(text), run, reporter=Signals("step 28 ", signal.SIGINT))
    return run


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(stopped, tmp_path / "run")))


def content(run: RunFolder) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ({"model__width": 8}, r"last\.safetensors does not fit the run's configuration: '.*' has shape"),
        ({"model__num_layers": 2}, r"last\.safetensors does not fit .*: it lacks the tensor"),
        ({"training__average": 0.9}, r"last\.safetensors holds no average of the weights"),
    ],
)
def test_a_configuration_that_no_longer_fits(
    run: RunFolder, text: Path, option: dict[str, float], complaint: str
) -> None:
    (run.path / "config.toml").write_text(small_config(text, **option).to_toml())
    before = content(run)
    with pytest.raises(UserError, match=complaint):
        resume(run.path)
    assert content(run) == before


def test_fewer_stages_than_are_done(run: RunFolder) -> None:
    fewer = replace(run.config, stage=run.config.stage[:1])
    (run.path / "config.toml").write_text(fewer.to_toml())
    with pytest.raises(UserError, match="in a later stage than the configuration has"):
        resume(run.path)


@pytest.mark.parametrize("name", ["metrics", "spans"])
def test_records_that_are_shorter_than_the_checkpoint_says(run: RunFolder, name: str) -> None:
    path = run.path / f"{name}.jsonl"
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole)[:-10])
    resume(run.path)
    lines = path.read_text().splitlines(keepends=True)
    assert lines[: len(whole) - 1] == whole[:-1]
    steps = [json.loads(line)["step"] for line in lines]
    assert len(steps) > len(whole)
    assert run.final() is not None


def test_a_run_that_died_between_its_first_evaluation_and_its_first_checkpoint(
    text: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    class Dies(Lines):
        def status(self, text: str, fraction: float) -> None:
            if "step 17 " in text:
                raise MemoryError

    run = RunFolder(tmp_path / "run")
    with pytest.raises(MemoryError):
        train(small_config(text, training__checkpoint_every=1000), run.path, reporter=Dies())
    assert not run.checkpoint("last").exists()
    resume(run.path, reporter=(said := Lines()))
    assert f"there is no {run.checkpoint('last')}: going on from best.safetensors" in said.lines
    assert f"going on with {run.path} after step 15" in said.lines
    assert outcome(run.path) == outcome(uninterrupted)


def test_weights_alone_are_nothing_to_go_on_with(run: RunFolder) -> None:
    run.checkpoint("last").unlink()
    checkpoint.save(run.checkpoint("best"), {"model.weight": torch.ones(1)}, {})
    before = content(run)
    with pytest.raises(UserError, match=r"best\.safetensors holds weights but no training to go on with"):
        resume(run.path)
    assert content(run) == before
