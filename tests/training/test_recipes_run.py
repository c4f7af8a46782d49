"""Every recipe, scaled down: ten steps that learn, a stop that changes nothing, and text at the end."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import longspan
from longspan import recipes
from longspan.config import RunConfig, schema
from longspan.registry import ARCHITECTURES
from longspan.training import Interrupted, resume, train

from .runs import Signals, metrics, outcome

STEPS = {1: [10], 2: [7, 3]}  # of one stage, or of two
SIZES = {
    "num_layers": 2,
    "width": 16,
    "num_heads": 2,
    "head_width": 6,
    "inner_width": 32,
    "ngram_rows": 64,
    "ngram_width": 4,
    "num_persistent": 6,
    "memory_length": 20,
    "long_memory_length": 40,
    "context": 24,
}
TRAINED = [name for name in recipes.names() if "search" not in recipes.load(name)]


def short_text(folder: Path) -> Path:
    """Words that follow from those before."""
    path = folder / "text.txt"
    path.write_text("the cat sat on a mat\nthe dog ran to the cat\n" * 300)
    return path


def scaled_down(name: str, text: Path) -> RunConfig:
    """The recipe with fewer and smaller parts and steps on a short text, not compiled; all else stays."""
    table = recipes.load(name)
    model: dict[str, Any] = table["model"]
    model |= {key: size for key, size in SIZES.items() if key in model}
    if "span" in model:
        model["span"] |= {"limit": SIZES["context" if "context" in model else "memory_length"], "ramp": 4}
        if "limit_shortest" in model["span"]:
            model["span"]["limit_shortest"] = 5
        if "windows" in model["span"]:
            model["span"]["windows"] = [[5, 20], [20, 7]]
    words = model.get("vocabulary", {})
    if "cutoffs" in words:
        words["cutoffs"] = [2 * number for number in range(1, len(words["cutoffs"]) + 1)]
        words["division"] = min(words.get("division", 1), 2)
    table["data"]["corpus"] = str(text)
    if "vocabulary_size" in table["data"].get("tokenizer", {}):
        table["data"]["tokenizer"]["vocabulary_size"] = 280
    table["training"] |= {"batch_size": 4, "block_length": 24, "device": "cpu", "log_every": 1}
    if "segment_length" in table["training"]:
        table["training"]["segment_length"] = 48
    table["training"] |= {"evaluate_every": 5, "checkpoint_every": 0, "compile": False}
    table.setdefault("evaluation", {}).update(batch_size=2, max_tokens=100, max_tokens_final=100)
    faster = max(1.0, 0.02 / table["stage"][0]["learning_rate"])  # ten steps of a narrow model
    for stage, steps in zip(table["stage"], STEPS[len(table["stage"])], strict=True):
        stage.pop("max_seconds", None)  # of a stage that ends by the clock no two runs are the same
        stage["steps"] = steps
        for rate in {"learning_rate", "adamw_learning_rate"} & stage.keys():
            stage[rate] *= faster
        stage["warmup_steps"] = min(stage.get("warmup_steps", 0), 2)
    return schema.read(RunConfig, table)


def test_every_architecture_has_a_recipe() -> None:
    assert {recipes.load(name)["model"]["architecture"] for name in TRAINED} == ARCHITECTURES.keys()


@pytest.mark.parametrize("recipe", TRAINED)
def test_it_learns_and_a_stop_changes_nothing(tmp_path: Path, recipe: str) -> None:
    config = scaled_down(recipe, short_text(tmp_path))
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(config, whole)
    losses = [line["loss"] for line in metrics(whole) if line["kind"] == "train"]
    assert len(losses) == 10
    assert losses[-1] < 0.9 * losses[0]

    with pytest.raises(Interrupted):
        train(config, stopped, reporter=Signals("step 6 ", signal.SIGINT))
    resume(stopped)
    assert outcome(stopped) == outcome(whole)

    assert longspan.load(whole).generate("the cat", tokens=5, seed=1)
