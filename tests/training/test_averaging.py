"""Averaged weights: the formula, what is judged and kept, and exact resume."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

import longspan
from longspan.errors import UserError
from longspan.runs import RunFolder, checkpoint
from longspan.training import Interrupted, resume, train
from longspan.training.averaging import Average

from .runs import Signals, metrics, outcome, small_config
from .tiny import TinyModel


def test_a_mean_at_first_and_then_a_moving_one() -> None:
    model = TinyModel()
    average = Average(model, decay=0.75)
    expected = torch.zeros(())
    for step in range(1, 9):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(step)
        average.follow(step)
        expected = torch.tensor(float(step + 1) / 2) if step <= 4 else 0.75 * expected + 0.25 * step
        for tensor in average.weights.values():
            torch.testing.assert_close(tensor, expected.expand_as(tensor))


def test_the_weights_come_back_whatever_happens() -> None:
    model = TinyModel()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    average = Average(model, decay=0.5)
    for tensor in average.weights.values():
        tensor.zero_()

    def fail_in_place() -> None:
        with average.in_place():
            assert all(not p.any() for p in model.parameters())
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail_in_place()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.fixture(scope="module")
def averaged(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("averaged") / "run"
    train(small_config(text, training__average=0.9), run)
    return run


def test_the_average_is_judged_and_kept(averaged: Path, uninterrupted: Path) -> None:
    folder = RunFolder.open(averaged)
    best = checkpoint.load(folder.checkpoint("best"))
    for name, average in best.below("average").items():
        assert torch.equal(best.below("model")[name], average)
    last = checkpoint.load(folder.checkpoint("last"))
    assert not torch.equal(
        last.below("model")["head.scores.weight"], last.below("average")["head.scores.weight"]
    )

    def losses(run: Path, kind: str) -> list[float]:
        return [line["loss"] for line in metrics(run) if line["kind"] == kind]

    assert losses(averaged, "train") == losses(uninterrupted, "train")  # it changes nothing in training
    assert losses(averaged, "valid") != losses(uninterrupted, "valid")
    final = metrics(averaged)[-1]["valid"]["loss"]
    assert final == pytest.approx(
        min(losses(averaged, "valid")), rel=0.05
    )  # over more text, the same weights
    loaded = longspan.load(averaged, device="cpu").model.state_dict()
    assert all(torch.equal(loaded[name], average) for name, average in best.below("average").items())


def test_a_stopped_run_goes_on_with_its_average(averaged: Path, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(
            small_config(text, training__average=0.9), run, reporter=Signals("train step 12 ", signal.SIGINT)
        )
    resume(run)
    assert outcome(run) == outcome(averaged)


def test_a_decay_of_one_is_refused(text: Path) -> None:
    with pytest.raises(UserError, match="average must be at least 0 and below 1"):
        small_config(text, training__average=1.0)
