"""Stages whose length is given in epochs, and rates that fall at epochs."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import longspan
from longspan.config import RunConfig, StageConfig
from longspan.errors import UserError
from longspan.optim import done, fraction
from longspan.runs import RunFolder, checkpoint
from longspan.training import Interrupted, is_finished, resume, train

from .runs import Signals, metrics, outcome, small_config

LANES, LANE = 6, 101  # 600 pairs of tokens in all


def stage(**settings: Any) -> StageConfig:
    return StageConfig(**{"learning_rate": 0.5, **settings})


def config(text: Path, *, jitter: bool = False, stages: list[dict[str, Any]], **training: Any) -> RunConfig:
    small = small_config(text)
    small = replace(
        small,
        training=replace(
            small.training, block_jitter=jitter, micro_batches=1, block_length=20, log_every=1, **training
        ),
        stage=tuple(StageConfig(**{"learning_rate": 0.01, **entry}) for entry in stages),
    )
    return small


def tokens() -> dict[str, Any]:
    ids = [(7 * i + i * i) % 11 for i in range(LANES * LANE)]
    return {"train": ids, "valid": ids[:200]}


def steps_of(run: Any) -> list[str]:
    return [line["stage"] for line in run.metrics if line["kind"] == "train"]


@pytest.mark.parametrize("segment_length", [None, 20])
def test_a_stage_reads_the_text_as_often_as_asked(segment_length, text, tmp_path):
    wanted = config(
        text,
        stages=[
            {"name": "first", "epochs": 2},
            {"name": "second", "steps": 3},
            {"name": "third", "epochs": 1, "block_length": 10},
        ],
        segment_length=segment_length,
    )
    run = longspan.train(wanted, tokens(), tmp_path / "run", vocabulary_size=11)
    # 100 columns are 5 blocks. Later epochs begin at a random offset, where fewer blocks may fit.
    named = steps_of(run)
    assert named[:3] == ["first"] * 3
    counts = {name: named.count(name) for name in ("first", "second", "third")}
    assert counts["second"] == 3
    per_epoch = 4 if segment_length else 5
    assert per_epoch + 3 <= counts["first"] <= 2 * per_epoch
    assert 2 * (per_epoch - 1) <= counts["third"] <= 10


def test_with_changing_block_lengths_an_epoch_ends_where_the_text_ends(text, tmp_path):
    positions = []
    original = longspan.training.loop.Loop._step

    def step(self: Any, blocks: Any) -> None:
        positions.append(blocks[-1].position)
        original(self, blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("longspan.training.loop.Loop._step", step)
        longspan.train(
            config(text, jitter=True, stages=[{"epochs": 3}]), tokens(), tmp_path / "run", vocabulary_size=11
        )
    assert {position.epoch for position in positions} == {0, 1, 2}
    lasts = [max(p.offset for p in positions if p.epoch == epoch) for epoch in range(3)]
    assert all(offset >= LANE - 20 for offset in lasts)  # no further block of full length fits


def test_a_resumed_run_ends_at_the_same_step(text, tmp_path):
    wanted = config(text, stages=[{"epochs": 4, "schedule": "cosine"}], batch_size=12, checkpoint_every=0)
    wanted = replace(wanted, training=replace(wanted.training, block_length=300, evaluate_every=0))
    whole = train(wanted, tmp_path / "whole").path
    last = metrics(whole)[-3]["step"]
    assert last > 5
    with pytest.raises(Interrupted):
        train(wanted, tmp_path / "stopped", reporter=Signals(f"step {last - 3}", signal.SIGTERM))
    folder = resume(tmp_path / "stopped")
    assert outcome(folder.path) == outcome(whole)
    assert is_finished(folder)
    resume(tmp_path / "stopped")
    assert outcome(folder.path) == outcome(whole)
    facts = checkpoint.load(folder.checkpoint("last")).facts["progress"]
    assert facts["stage_epochs"] == 4


def test_more_epochs_continue_a_finished_run(text, tmp_path):
    wanted = config(text, stages=[{"epochs": 1}])
    wanted = replace(wanted, training=replace(wanted.training, block_length=300))
    run = train(wanted, tmp_path / "run").path
    before = checkpoint.load(run / "checkpoints/last.safetensors").facts["progress"]["step"]
    toml = run / "config.toml"
    toml.write_text(toml.read_text().replace("epochs = 1", "epochs = 2"))
    assert not is_finished(RunFolder.open(run))
    resume(run)
    after = checkpoint.load(run / "checkpoints/last.safetensors").facts["progress"]
    assert after["step"] >= 2 * before - 1
    assert after["stage_epochs"] == 2


def test_lengths_exclude_each_other():
    with pytest.raises(ValueError, match="not both"):
        stage(steps=3, epochs=2)
    with pytest.raises(ValueError, match="as steps or as epochs"):
        stage()
    with pytest.raises(ValueError, match="epochs must be at least 1"):
        stage(epochs=0)


def test_epochs_need_a_text_that_starts_again(text, tmp_path):
    with pytest.raises(ValueError, match="at_end = 'restart'"):
        config(text, stages=[{"epochs": 1}], at_end="stop")
    with pytest.raises(UserError, match="no epochs"):
        longspan.train(
            config(text, stages=[{"epochs": 1}]),
            {"train": iter([]), "valid": [1, 2, 3]},
            tmp_path / "run",
            vocabulary_size=11,
        )
    with pytest.raises(UserError, match="remove when"):
        longspan.train(
            config(text, stages=[{"steps": 9, "when": [1]}]),
            {"train": iter([]), "valid": [1, 2, 3]},
            tmp_path / "run",
            vocabulary_size=11,
        )


def test_schedules_follow_the_epochs():
    falling = stage(epochs=4, schedule="cosine")
    assert [done(falling, 7, 0.0, epochs) for epochs in (0.0, 1.0, 3.0, 4.0)] == [0.0, 0.25, 0.75, 1.0]
    assert fraction(falling, 8, 0.0, 2.0) == pytest.approx(0.5)


def test_the_rate_falls_at_the_given_epochs(text, tmp_path):
    drops = stage(epochs=9, when=(2, 5), when_factor=0.5)
    found = [fraction(drops, 10, 0.0, epochs) for epochs in (0.0, 1.9, 2.0, 4.9, 5.0, 8.0)]
    assert found == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert fraction(stage(steps=9, when=(1,)), 3, 0.0, 1.0) == 0.1
    for wrong in ((0,), (2, 2), (3, 1)):
        with pytest.raises(ValueError, match="increasing order"):
            stage(epochs=9, when=wrong)
    for stages in ([{"epochs": 3, "when": (1, 2)}], [{"steps": 14, "when": (1, 2)}]):
        name = "-".join(stages[0])
        run = longspan.train(config(text, stages=stages), tokens(), tmp_path / name, vocabulary_size=11)
        rates = [line["learning_rate"] for line in run.metrics if line["kind"] == "train"]
        assert rates[:5] == [0.01] * 5
        assert sorted({round(rate, 9) for rate in rates}) == [0.0001, 0.001, 0.01]
        assert rates == sorted(rates, reverse=True)
