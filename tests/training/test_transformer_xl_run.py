"""Transformer-XL's recipes, scaled down: trained, stopped and resumed, and measured with a longer memory."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

import longspan
from longspan import recipes
from longspan.cli import main
from longspan.config import RunConfig, schema
from longspan.training import Interrupted, resume, train

from .runs import Signals, metrics, outcome

SMALL = {
    "data.tokenizer.kind": "byte",
    "model.num-layers": "2",
    "model.width": "16",
    "model.num-heads": "2",
    "model.head-width": "6",
    "model.inner-width": "24",
    "model.memory-length": "20",
    "training.batch-size": "4",
    "training.block-length": "16",
    "training.device": "cpu",
    "training.log-every": "1",
    "training.evaluate-every": "5",
    "stage.0.steps": "10",
    "stage.0.learning-rate": "0.01",
    "evaluation.max-tokens": "300",
}


@pytest.mark.parametrize("recipe", ["txl-enwik8", "txl-text8", "txl-wikitext-103"])
def test_it_learns_and_a_stop_changes_nothing(text: Path, tmp_path: Path, recipe: str, capsys) -> None:
    table = recipes.load(recipe)
    changes = {**SMALL, "data.corpus": str(text)}
    if recipe == "txl-wikitext-103":
        changes["model.vocabulary.cutoffs"] = "[100, 120]"
    for name, value in changes.items():
        schema.override(table, name, value)
    config = schema.read(RunConfig, table)
    whole = tmp_path / "whole"
    train(config, whole)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "stopped", reporter=Signals("step 7 ", signal.SIGINT))
    resume(tmp_path / "stopped")
    assert outcome(tmp_path / "stopped") == outcome(whole)
    losses = [line["loss"] for line in metrics(whole) if line["kind"] == "train"]
    assert losses[-1] < 0.9 * losses[0]

    assert len(longspan.load(whole).generate("a", tokens=30, seed=1)) > 0
    lengths = ["--model.memory-length", "50", "--model.clamp-length", "12", "--model.same-length", "true"]
    scores = []
    for options in (
        ["--block-length", "8"],
        ["--block-length", "8", *lengths],
        ["--block-length", "5", *lengths],
    ):
        capsys.readouterr()
        assert main(["eval", str(whole), "--protocol", "every-token", "--json", *options]) == 0
        scores.append(json.loads(capsys.readouterr().out)["loss"])
    trained, longer, longer_in_other_blocks = scores
    assert longer != trained
    assert longer == pytest.approx(longer_in_other_blocks, abs=2e-7)
