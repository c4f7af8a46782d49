"""A stopped run that somebody, or a crash, has changed: it goes on, or one line says why it cannot."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from longspan.errors import UserError
from longspan.runs import RunFolder, checkpoint
from longspan.training import Interrupted, is_finished, resume, train

from .runs import Lines, Signals, metrics, outcome, small_config


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
        ({"training__batch_size": 4}, r"training\.batch_size = 4, but the run began with 6: put that back"),
        ({"training__segment_length": 48, "training__block_jitter": False}, "segment_length = 48, .* none: "),
        ({"training__precision": "fp16"}, r"training\.precision = 'fp16', .* with 'float32'"),
        ({"training__seed": 2}, r"training\.seed = 2"),
        ({"stage__1__optimizer": "adam"}, r"stage\.1\.optimizer = 'adam', but the run began with 'adagrad'"),
        ({"model__width": 8}, r"model\.width = 8, but the run began with 16"),
        ({"model__norm": "pre"}, r"model\.norm = 'pre', but the run began with 'post'"),
        ({"data__tokenizer__kind": "character"}, r"data\.tokenizer\.kind = 'character'"),
        ({"model__span__penalty_from": 3}, r"model\.span\.penalty_from = 3, but the run began with 0: put"),
        ({"training__average": 0.9}, r"last\.safetensors holds no average of the weights"),
    ],
)
def test_a_configuration_that_no_longer_fits(
    run: RunFolder, text: Path, option: dict[str, float | str], complaint: str
) -> None:
    (run.path / "config.toml").write_text(small_config(text, **option).to_toml())
    before = content(run)
    with pytest.raises(UserError, match=complaint):
        resume(run.path)
    assert content(run) == before


def test_a_penalty_that_ramps_in_may_do_so_later(text: Path, tmp_path: Path) -> None:
    config = small_config(text, model__span__penalty_from=5)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", reporter=Signals("step 28 ", signal.SIGINT))
    later = small_config(text, model__span__penalty_from=35, model__span__penalty=1e-2)
    (tmp_path / "run" / "config.toml").write_text(later.to_toml())
    assert resume(tmp_path / "run").final() is not None


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ({"model__width": 8}, r"last\.safetensors does not match the run's configuration: '.*' has shape"),
        ({"model__num_layers": 2}, r"last\.safetensors does not match .*: it has no tensor"),
    ],
)
def test_the_checkpoint_of_another_run(
    run: RunFolder, text: Path, option: dict[str, float], complaint: str
) -> None:
    (run.path / "config.toml").write_text(small_config(text, **option).to_toml())
    saved = checkpoint.load(run.checkpoint("last"))
    facts = {name: fact for name, fact in saved.facts.items() if name != "fixed_options"}
    checkpoint.save(run.checkpoint("last"), saved.tensors, facts)
    with pytest.raises(UserError, match=complaint):
        resume(run.path)


def test_what_older_checkpoints_call_fixed_may_change(run: RunFolder) -> None:
    saved = checkpoint.load(run.checkpoint("last"))
    facts = saved.facts | {"fixed_options": saved.facts["fixed_options"] | {"model.span.growth": [0.5, 1.0]}}
    checkpoint.save(run.checkpoint("last"), saved.tensors, facts)
    resume(run.path)
    assert run.final() is not None


def test_what_may_change_is_heeded(run: RunFolder, text: Path) -> None:
    free = {
        "stage__0__optimizer": "lamb",  # of a stage that is over
        "stage__1__learning_rate": 0.25,
        "stage__1__steps": 10,
        "training__block_length": 12,
        "training__block_jitter": False,
        "training__micro_batches": 1,
        "training__log_every": 1,
        "model__dropout": 0.0,
        "model__span__penalty": 0.0,
        "model__span__growth": [0.5, 1.0],
    }
    (run.path / "config.toml").write_text(small_config(text, **free).to_toml())
    resume(run.path)
    steps = [line for line in metrics(run.path) if line["kind"] == "train"]
    assert [line["step"] for line in steps[-7:]] == [*range(29, 36)]
    assert [line["learning_rate"] for line in steps[-6:]] == [0.25] * 6
    assert {after["tokens"] - before["tokens"] for before, after in pairwise(steps[-7:])} == {6 * 12}


@pytest.mark.parametrize("which", ["files", "folder"])
def test_checkpoints_that_are_gone(run: RunFolder, which: str) -> None:
    """Starting again would cut the logs to nothing."""
    if which == "files":
        for path in (run.path / "checkpoints").iterdir():
            path.unlink()
    else:
        shutil.rmtree(run.path / "checkpoints")
    before = content(run)
    with pytest.raises(UserError, match="has no checkpoint left to continue from: put its folder"):
        resume(run.path)
    assert content(run) == before


def test_a_configuration_with_a_mistake_is_named(run: RunFolder) -> None:
    config = run.path / "config.toml"
    config.write_text(config.read_text().replace("batch_size", "bath_size"))
    with pytest.raises(UserError, match=r"run/config\.toml: unknown key 'training\.bath_size'"):
        resume(run.path)


def test_fewer_stages_than_are_done(run: RunFolder) -> None:
    fewer = replace(run.config, stage=run.config.stage[:1])
    (run.path / "config.toml").write_text(fewer.to_toml())
    with pytest.raises(UserError, match="from a stage that the configuration no longer has"):
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
    assert f"there is no {run.checkpoint('last')}: continuing from best.safetensors" in said.lines
    assert f"continuing {run.path} after step 15" in said.lines
    assert outcome(run.path) == outcome(uninterrupted)


def test_a_finished_run_that_gets_more_steps_goes_on(run: RunFolder, text: Path, uninterrupted: Path) -> None:
    config = run.path / "config.toml"
    config.write_text(small_config(text, stage__1__steps=10).to_toml())
    resume(run.path)
    assert run.final() is not None
    assert is_finished(run)
    config.write_text(small_config(text).to_toml())
    longer = RunFolder.open(run.path)
    assert not is_finished(longer)
    resume(run.path)
    assert is_finished(longer)
    assert [line["kind"] for line in metrics(run.path)].count("final") == 1
    assert outcome(run.path)["last"][1] == outcome(uninterrupted)["last"][1]
    assert longer.final() == RunFolder.open(uninterrupted).final()


def test_so_does_one_that_gets_another_stage(run: RunFolder) -> None:
    resume(run.path)
    fine = replace(run.config.stage[1], name="finer", steps=2)
    (run.path / "config.toml").write_text(replace(run.config, stage=(*run.config.stage, fine)).to_toml())
    resume(run.path)
    assert metrics(run.path)[-3]["stage"] == "finer"
    assert metrics(run.path)[-3]["step"] == 45


def test_a_score_outlives_its_checkpoint(run: RunFolder) -> None:
    resume(run.path)
    run.checkpoint("last").unlink()
    assert is_finished(run)


@pytest.mark.parametrize("steps", [3, 18])  # no step is left, or some with an evaluation at their end
def test_a_best_checkpoint_that_is_lost_is_made_again(run: RunFolder, text: Path, steps: int) -> None:
    (run.path / "config.toml").write_text(small_config(text, stage__1__steps=steps).to_toml())
    run.checkpoint("best").unlink()
    resume(run.path)
    final = run.final()
    assert final is not None
    assert final["step"] == checkpoint.load(run.checkpoint("best")).facts["progress"]["step"] >= 28


def test_weights_alone_are_nothing_to_go_on_with(run: RunFolder) -> None:
    for path in (run.checkpoint("last"), *checkpoint.previous(run.checkpoint("last"))):
        path.unlink()
    checkpoint.save(run.checkpoint("best"), {"model.weight": torch.ones(1)}, {})
    before = content(run)
    with pytest.raises(
        UserError, match=r"best\.safetensors holds only weights, no state of a training to resume"
    ):
        resume(run.path)
    assert content(run) == before
