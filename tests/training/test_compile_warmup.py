"""Warm-up steps are rolled back and leave no trace, except compiled code and captured graphs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.errors import UserError
from longspan.models import Stack
from longspan.training import Interrupted, resume, train
from longspan.training.step import Updater

from .runs import Signals, metrics, outcome, small_config


@pytest.mark.parametrize("steps", [1, 5])
def test_a_warm_run_is_the_run(text: Path, uninterrupted: Path, tmp_path: Path, steps: int) -> None:
    train(small_config(text, training__compile_warmup=steps), tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(uninterrupted)


def test_it_is_warm_again_when_it_goes_on(text: Path, uninterrupted: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(small_config(text, training__compile_warmup=2), run, reporter=Signals("fine step 31 ", 2))
    resume(run)
    assert outcome(run) == outcome(uninterrupted)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_counters_and_scales_of_gradients_come_back(text: Path, tmp_path: Path, precision: str) -> None:
    changes = {"training__precision": precision, "model__span__penalty_full": 9, "stage__1__steps": 2}
    train(small_config(text, **changes), tmp_path / "plain")
    train(small_config(text, **changes, training__compile_warmup=3), tmp_path / "warm")
    assert outcome(tmp_path / "warm") == outcome(tmp_path / "plain")


def test_updates_have_rate_0_and_all_losses(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[set[float]] = []
    ahead: list[int] = []
    update = Updater.update

    def noting(self: Updater, *arguments: Any, **options: Any) -> Any:
        optimizers = arguments[3]
        rates.append({group["lr"] for optimizer in optimizers for group in optimizer.param_groups})
        ahead.append(len(options["multi_token"]))
        return update(self, *arguments, **options)

    monkeypatch.setattr(Updater, "update", noting)
    changes = {"stage__0__multi_token": [0.5, 0.25], "stage__0__steps": 3, "stage__1__steps": 1}
    train(small_config(text, **changes, training__compile_warmup=2), tmp_path / "run")
    assert rates[:2] == [{0.0}, {0.0}]
    assert all(min(of_step) > 0 for of_step in rates[2:])
    assert ahead == [2, 2, 2, 2, 2, 0]


def test_its_time_is_not_counted(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first step that takes as long as a compilation."""
    calls = []
    forward = Stack.forward

    def slow_at_first(self: Stack, tokens: torch.Tensor, state: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            time.sleep(1.0)
        return forward(self, tokens, state)

    monkeypatch.setattr(Stack, "forward", slow_at_first)
    train(
        small_config(text, training__compile_warmup=1, stage__0__steps=2, stage__1__steps=1), tmp_path / "run"
    )
    *_, line = (line for line in metrics(tmp_path / "run") if line["kind"] == "train")
    assert line["step"] == 3
    assert line["seconds"] < 0.9


def test_mistakes(text: Path) -> None:
    with pytest.raises(UserError, match="compile_warmup must not be negative"):
        small_config(text, training__compile_warmup=-1)
