"""A search from its first step to its last line: what it writes, and that a stop changes nothing."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from longspan import load
from longspan.data import prepare
from longspan.errors import UserError
from longspan.evaluation import evaluate
from longspan.inspection import read_architecture
from longspan.models import Supernet
from longspan.runs import RunFolder, checkpoint
from longspan.runs.freeze_spans import freeze_spans
from longspan.search import Searching, read_findings
from longspan.training import Interrupted, resume, train

from ..training.runs import Signals, metrics, outcome
from ..training.test_recipes_run import scaled_down, short_text
from ..training.test_resume import Dies
from .searches import search_config


def whole_outcome(run: Path) -> dict[str, Any]:
    return outcome(run) | {"architecture": (run / "architecture.jsonl").read_text()}


def saved(run: Path, name: str) -> Tensor:
    return checkpoint.load(run / "checkpoints" / "last.safetensors").tensors[name]


def test_a_killed_search_resumes_exactly(text: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """By turns, in both stages, before and after the architecture first moves, and in the last evaluation."""
    run = tmp_path / "hunt"
    with pytest.raises(MemoryError):
        train(search_config(text), run, reporter=Dies("step 9 "), strategy=Searching)
    for words in ("step 12 ", "step 17 ", "scoring test"):
        with pytest.raises(MemoryError):
            resume(run, reporter=Dies(words), strategy=Searching)
    resume(run, strategy=Searching)
    assert saved(run, "optimizer.blocks.0.logits_K.exp_avg").count_nonzero() == 3
    assert whole_outcome(run) == whole_outcome(uninterrupted)


def test_the_recipe_scaled_down_learns_and_a_stop_changes_nothing(tmp_path: Path) -> None:
    config = scaled_down("wikitext2-par-search", short_text(tmp_path))
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(config, whole, strategy=Searching)
    losses = [line["loss"] for line in metrics(whole) if line["kind"] == "train"]
    assert len(losses) == 10
    assert losses[-1] < 0.9 * losses[0]
    with pytest.raises(Interrupted):
        train(config, stopped, reporter=Signals("step 6 ", signal.SIGINT), strategy=Searching)
    resume(stopped, strategy=Searching)
    assert whole_outcome(stopped) == whole_outcome(whole)


@pytest.mark.parametrize(("sampling", "cost"), [("straight-through", "flops"), ("soft", "latency")])
def test_a_signal_saves_and_stops(text: Path, tmp_path: Path, sampling: str, cost: str) -> None:
    config = search_config(text, updates="together", search__sampling=sampling, search__cost=cost)
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(config, run, reporter=Signals("step 11 ", signal.SIGINT), strategy=Searching)
    costs = saved(run, "model.costs_K")
    resume(run, strategy=Searching)
    assert saved(run, "model.costs_K").equal(costs), "what was measured once is not measured again"
    assert (costs[:2] > 0).all()
    assert costs[2] == 0
    if cost == "flops":  # the times of two runs are never the same
        assert whole_outcome(run) == whole_outcome(train(config, tmp_path / "whole", strategy=Searching).path)


def test_a_seed_decides_the_pattern(text: Path, uninterrupted: Path, tmp_path: Path) -> None:
    same = train(search_config(text), tmp_path / "same", strategy=Searching).path
    assert whole_outcome(same) == whole_outcome(uninterrupted)
    other = train(search_config(text, training__seed=2), tmp_path / "other", strategy=Searching).path
    assert read_architecture(RunFolder.open(other)).probabilities_NBK.tolist() != (
        read_architecture(RunFolder.open(same)).probabilities_NBK.tolist()
    )


def test_the_history_of_the_architecture(uninterrupted: Path) -> None:
    history = read_architecture(RunFolder.open(uninterrupted))
    assert (history.name, history.candidates) == ("hunt", "sfi")
    assert history.steps_N.tolist() == [4, 8, 12, 16, 20, 23]
    assert history.probabilities_NBK.shape == (6, 3, 3)
    np.testing.assert_allclose(history.probabilities_NBK.sum(-1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(history.probabilities_NBK[0], 1 / 3, rtol=1e-6)  # in the warm-up
    assert np.abs(history.probabilities_NBK[-1] - 1 / 3).max() > 0.01
    np.testing.assert_allclose(history.temperatures_N, 0.1 ** (history.steps_N / 23), rtol=1e-5)


def test_soft_and_hard_are_in_every_evaluation(uninterrupted: Path) -> None:
    lines = metrics(uninterrupted)
    trained = [line for line in lines if line["kind"] == "train"]
    judged = [line for line in lines if line["kind"] == "valid"]
    assert [line["step"] for line in judged] == [10, 20, 23]
    assert all(set(line["pattern"]) <= set("sfi") and len(line["pattern"]) == 3 for line in trained + judged)
    assert all(math.isfinite(line["soft"]["loss"]) for line in judged)
    assert all(line["loss"] != line["soft"]["loss"] for line in judged)
    best = min(judged, key=lambda line: line["loss"])
    assert [line for line in judged if line["best"]][-1] == best
    assert lines[-1]["kind"] == "final"
    assert (lines[-1]["step"], lines[-1]["pattern"]) == (best["step"], best["pattern"])


def test_with_an_average_it_is_the_pattern_of_the_average_that_is_judged(text: Path, tmp_path: Path) -> None:
    by_turns = {"search__warm_up_steps": 0, "search__architecture_every": 1}
    config = search_config(text, training__average=0.99, training__seed=5, **by_turns)  # where they differ
    lines = metrics(train(config, tmp_path / "run", strategy=Searching).path)
    best = [line for line in lines if line["kind"] == "valid" and line["best"]][-1]
    assert (lines[-1]["step"], lines[-1]["pattern"]) == (best["step"], best["pattern"])


def test_a_search_has_nothing_to_freeze(uninterrupted: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"found\.toml"):
        freeze_spans(RunFolder.open(uninterrupted), tmp_path / "frozen")
    assert not (tmp_path / "frozen").exists()


def test_the_scores_are_those_of_the_ordinary_evaluation(uninterrupted: Path) -> None:
    lm = load(uninterrupted)
    assert isinstance(lm.model, Supernet)
    corpus = prepare(lm.config.data)
    final = metrics(uninterrupted)[-1]["test"]
    for choice, expected in (("hard", final), ("soft", final["soft"])):
        with lm.model.evaluating(choice):  # type: ignore[arg-type]
            score = evaluate(
                lm.model,
                corpus.splits["test"],
                tokenizer=lm.tokenizer,
                config=lm.config.evaluation,
                block_length=lm.config.training.block_length,
                device="cpu",
            )
        assert score.nats == pytest.approx(expected["nats"], rel=1e-6)


def test_findings_are_those_of_the_best_weights(uninterrupted: Path) -> None:
    findings = read_findings(RunFolder.open(uninterrupted), top=100)
    assert findings.pattern == metrics(uninterrupted)[-1]["pattern"] == findings.top[0][0]
    assert len(findings.top) == 27
    assert sum(probability for _, probability in findings.top) == pytest.approx(1.0)
    letters = [findings.candidates[k] for k in findings.probabilities_BK.argmax(axis=1)]
    assert "".join(letters) == findings.pattern


def test_a_search_is_not_trained_by_train(text: Path, uninterrupted: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="use 'longspan search'"):
        train(search_config(text), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="use 'longspan search'"):
        resume(uninterrupted)


@pytest.mark.parametrize("damage", ["{}", "[1]", '{"step": 1', "\x00"])
def test_a_damaged_line_is_named(uninterrupted: Path, tmp_path: Path, damage: str) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / "config.toml").write_bytes((uninterrupted / "config.toml").read_bytes())
    lines = (uninterrupted / "architecture.jsonl").read_text().splitlines(keepends=True)
    run.architecture.write_text(lines[0] + damage + "\n" + lines[1])
    with pytest.raises(UserError, match=r"line 2 of .*architecture\.jsonl is damaged: delete that line"):
        read_architecture(run)
    run.architecture.write_text(lines[0] + lines[1][:20])  # as a killed run leaves it
    assert read_architecture(run).steps_N.tolist() == [json.loads(lines[0])["step"]]
    run.architecture.unlink()
    with pytest.raises(UserError, match="has no architectures to show"):
        read_architecture(run)


def test_tensorboard_shows_the_probabilities(uninterrupted: Path) -> None:
    events = EventAccumulator(str(uninterrupted / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    lines = (uninterrupted / "architecture.jsonl").read_text().splitlines()
    images = events.Images("search/candidates_down_blocks_across")
    assert [image.step for image in images] == [json.loads(line)["step"] for line in lines]
