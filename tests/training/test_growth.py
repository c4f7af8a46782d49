"""Runs whose windows grow: what is seen in steps and evaluations, and runs that stop and go on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import longspan
from longspan.config import RunConfig
from longspan.layers.span import Span
from longspan.models import LanguageModel
from longspan.runs.init import Init
from longspan.training import Interrupted, resume, scoring, train
from longspan.training.step import Updater

from .runs import Signals, metrics, outcome, small_config

# Evaluations are at the borders of parts.
STEPS = {"stage__0__steps": 12, "stage__1__steps": 9, "training__evaluate_every": 7}
GROWTH = {"model__span__growth": [0.25, 0.5, 1.0]}
SPANS: dict[str, dict[str, Any]] = {
    "learned": {"model__span__start": 0.9},
    "fixed": {"model__span__kind": "fixed", "model__span__limit": 64},
}


def config(text: Path, kind: str, **changes: Any) -> RunConfig:
    return small_config(text, **STEPS, **SPANS[kind], **GROWTH, **changes)


def part(model: LanguageModel) -> float:
    (span,) = (module for module in model.modules() if isinstance(module, Span))
    assert span.growth is not None
    return span.growth.part


def parts_of_steps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A list that gets the part of every step from now on."""
    parts: list[float] = []
    update = Updater.update

    def noting(self: Updater, *arguments: Any, **options: Any) -> Any:
        parts.append(part(self.model))
        return update(self, *arguments, **options)

    monkeypatch.setattr(Updater, "update", noting)
    return parts


@pytest.mark.parametrize("kind", SPANS)
def test_a_run_goes_on_exactly(
    text: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in every part: also just before and at a border, and when an evaluation is due."""
    whole = train(config(text, kind), tmp_path / "whole").path
    parts = parts_of_steps(monkeypatch)
    steps = iter((6, 7, 10, 18))
    with pytest.raises(Interrupted):
        train(config(text, kind), tmp_path / "run", reporter=Signals(f"step {next(steps)} ", signal.SIGINT))
    for step in steps:
        with pytest.raises(Interrupted):
            resume(tmp_path / "run", reporter=Signals(f"step {step} ", signal.SIGINT))
    resume(tmp_path / "run")
    monkeypatch.undo()
    assert parts == [0.25] * 7 + [0.5] * 7 + [1.0] * 7
    assert outcome(tmp_path / "run") == outcome(whole)
    plain = small_config(text, **STEPS, **SPANS[kind])
    without = metrics(train(plain, tmp_path / "plain").path)
    assert metrics(whole)[0]["loss"] != without[0]["loss"]


def test_the_warm_up_runs_every_shape_and_leaves_no_trace(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shapes of the first steps are run last: their graphs are kept."""
    plain = train(config(text, "fixed"), tmp_path / "plain").path
    parts = parts_of_steps(monkeypatch)
    run = train(config(text, "fixed", training__compile_warmup=2), tmp_path / "run").path
    assert parts == [1.0, 0.5, 0.25, 0.25] + [0.25] * 7 + [0.5] * 7 + [1.0] * 7
    assert outcome(run) == outcome(plain)


def test_evaluations_and_loaded_models_see_what_the_steps_before_saw(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    evaluate = scoring.evaluate

    def noting(model: LanguageModel, *arguments: Any, **options: Any) -> Any:
        seen.append(part(model))
        return evaluate(model, *arguments, **options)

    monkeypatch.setattr(scoring, "evaluate", noting)
    run = train(config(text, "learned"), tmp_path / "run").path
    assert seen == [0.25, 0.5, 1.0, 1.0, 1.0]  # after steps 7, 14 and 21 of 21; then the held-out splits
    assert part(longspan.load(run).model) == 1.0
    seen.clear()
    changes = {"training__patience": 1, "training__evaluate_every": 3, "stage__0__learning_rate": 0.0}
    stopped = train(small_config(text, **STEPS | SPANS["learned"] | GROWTH | changes), tmp_path / "stopped")
    assert seen == [0.25] * 4  # it ended early, and its best weights are of the first part
    assert part(longspan.load(stopped.path).model) == 0.25


@pytest.mark.parametrize("kind", SPANS)
def test_an_interrupted_run_is_scored_as_it_was_while_it_trained(
    text: Path, tmp_path: Path, kind: str
) -> None:
    with pytest.raises(Interrupted):
        train(config(text, kind), tmp_path / "run", reporter=Signals("step 13 ", signal.SIGINT))
    (logged,) = (line for line in metrics(tmp_path / "run") if line["kind"] == "valid")  # after step 7
    seen = [part(longspan.load(tmp_path / "run", which=which).model) for which in ("best", "last")]
    assert seen == [0.25, 0.5]
    found = longspan.evaluate(tmp_path / "run", split="valid", max_tokens=logged["tokens"])
    assert found.loss == pytest.approx(logged["loss"], rel=1e-6)


def test_a_run_that_is_extended_does_not_go_back(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(config(text, "fixed"), tmp_path / "run").path
    parts = parts_of_steps(monkeypatch)
    longer = small_config(text, **STEPS | SPANS["fixed"] | GROWTH | {"stage__1__steps": 39})
    resume(run, config=longer)
    assert parts == [1.0] * 30


def test_a_run_from_the_weights_of_another_sees_all(text: Path, tmp_path: Path) -> None:
    run = train(config(text, "learned"), tmp_path / "run").path
    assert Init(run).recipe()["model"]["span"].get("growth", []) == []
