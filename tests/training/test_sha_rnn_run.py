"""SHA-RNN's recipe, scaled down: LAMB in two stages, blocks of jittered length, a memory that overflows."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest

from longspan import recipes
from longspan.config import RunConfig, schema
from longspan.training import Interrupted, resume, train

from .runs import Signals, metrics, outcome

SMALL = {
    "data.tokenizer.kind": "byte",
    "model.num-layers": "2",
    "model.width": "16",
    "model.inner-width": "40",
    "model.memory-length": "40",
    "training.batch-size": "4",
    "training.block-length": "24",
    "training.device": "cpu",
    "training.log-every": "1",
    "training.evaluate-every": "5",
    "stage.0.steps": "10",
    "stage.0.warmup-steps": "3",
    "stage.1.steps": "5",
    "stage.1.warmup-steps": "0",
    "evaluation.max-tokens": "300",
}


@pytest.mark.parametrize("recipe", ["sha-rnn", "sha-rnn-one"])
def test_it_learns_and_a_stop_changes_nothing(text: Path, tmp_path: Path, recipe: str) -> None:
    table = recipes.load(recipe)
    for name, value in {**SMALL, "data.corpus": str(text)}.items():
        schema.override(table, name, value)
    config = schema.read(RunConfig, table)
    train(config, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(config, tmp_path / "stopped", reporter=Signals("step 7 ", signal.SIGINT))
    resume(tmp_path / "stopped")
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "whole")
    losses = [line["loss"] for line in metrics(tmp_path / "whole") if line["kind"] == "train"]
    assert losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert losses[-1] < 0.9 * losses[0]
