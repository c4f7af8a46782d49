"""`examples/plain_pytorch.py`: a plain model with learned spans loses nothing against the package's own."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import longspan
from longspan.config import AdaptiveSpanConfig, SpanConfig, StageConfig
from longspan.models import build
from longspan.optim import build_optimizers
from longspan.output import softmax
from longspan.training.step import Updater

EXAMPLE = Path(__file__).parents[1] / "examples" / "plain_pytorch.py"
VOCABULARY, WIDTH, HEADS, INNER, LAYERS, LIMIT = 29, 32, 2, 48, 2, 100
SPAN = {"ramp": 6, "start": 0.1, "penalty": 1e-3}
BATCH, BLOCK, STEPS, LR, CLIP = 3, 20, 30, 0.07, 0.03


def text(length: int) -> torch.Tensor:
    """Noise in which every seventh token repeats the one 14 before."""
    tokens = torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(1))
    for t in range(14, length, 7):
        tokens[t] = tokens[t - 14]
    return tokens


def plain(dtype: torch.dtype, tokens: torch.Tensor) -> tuple[Any, list[float]]:
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(5)
    model = example["Model"](VOCABULARY, WIDTH, HEADS, INNER, LAYERS, LIMIT, **SPAN).to(dtype)
    return model, example["train"](model, tokens, BLOCK, STEPS, LR, CLIP)


def options() -> dict[str, Any]:
    return {"num_layers": LAYERS, "width": WIDTH, "num_heads": HEADS, "inner_width": INNER}


def lanes() -> torch.Tensor:
    length = STEPS * BLOCK + 1
    return text(BATCH * length).view(BATCH, length)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_same_seed_same_losses_as_our_own_step(
    dtype: torch.dtype, rtol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Our head gives float32 whatever the model's precision is; without that float64 would show 1e-7.
    monkeypatch.setattr(softmax, "scores", F.linear)
    tokens = lanes()
    model, losses = plain(dtype, tokens)
    torch.manual_seed(5)
    ours = build(AdaptiveSpanConfig(**options(), span=SpanConfig(limit=LIMIT, **SPAN)), VOCABULARY).to(dtype)
    stage = StageConfig(steps=STEPS, optimizer="adagrad", learning_rate=LR, clip_norm=CLIP)
    updater, optimizers = Updater(ours), build_optimizers(ours, stage)
    state, expected = ours.initial_state(BATCH), []
    for start in range(0, STEPS * BLOCK, BLOCK):
        block = tokens[:, start : start + BLOCK + 1]
        nats, state = updater.update(block[:, :-1], block[:, 1:], state, optimizers)
        expected.append(nats.item() / block[:, 1:].numel())
    assert losses == pytest.approx(expected, rel=rtol)
    assert losses[-1] < losses[0] - 0.1
    moved = torch.stack([layer.span() for layer in model.layers])
    torch.testing.assert_close(moved, _spans(ours), rtol=1e-4, atol=1e-4)
    assert (moved - SPAN["start"] * LIMIT).abs().min() > 0.1  # every head has learned a span


def test_same_seed_same_losses_as_longspan_train(tmp_path: Path) -> None:
    tokens = lanes()
    _, losses = plain(torch.float32, tokens)
    recipe: dict[str, Any] = {
        "name": "own",
        "model": {"architecture": "adaptive-span", **options(), "span": {"limit": LIMIT, **SPAN}},
        "training": {
            "batch_size": BATCH,
            "block_length": BLOCK,
            "seed": 5,
            "device": "cpu",
            "precision": "float32",
            "log_every": 1,
            "evaluate_every": STEPS,
        },
        "stage": [{"steps": STEPS, "optimizer": "adagrad", "learning_rate": LR, "clip_norm": CLIP}],
    }
    # One more token in every lane, so that the last block is not the beginning of a second epoch.
    padded = F.pad(tokens, (0, 1)).flatten().numpy()
    data = {"train": padded, "valid": np.asarray(tokens[0, :200])}
    run = longspan.train(recipe, data, tmp_path / "run", vocabulary_size=VOCABULARY)
    expected = [line["loss"] for line in run.metrics if line["kind"] == "train"]
    assert losses == pytest.approx(expected, rel=1e-5)


def test_the_example_runs_and_is_short() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.findall(r"\d+\.\d+", done.stdout)[:2])
    assert last < first - 2
    assert len(re.findall(r"layer \d: spans of \d+, \d+, \d+, \d+ tokens", done.stdout)) == 2
    model = re.search(r"class Layer.*?(?=\n\n\nif __name__)", EXAMPLE.read_text(), flags=re.DOTALL)
    assert model is not None
    assert sum(bool(line) for line in model[0].splitlines()) <= 60


def _spans(model: torch.nn.Module) -> torch.Tensor:
    return torch.stack([span() for span in model.modules() if isinstance(span, longspan.nn.LearnedSpan)])
