"""Whole training runs against recorded ones of the original SHA-RNN, in float64 and with nothing random.

Everything of a run takes part: lanes, the carried state, schedule, clipping and optimizer. Only the initial
weights and the block lengths are given, because the original's are not drawn from our generators.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

import longspan
from longspan.config import RunConfig, ShaRnnConfig
from longspan.data.lanes import Lanes
from longspan.interop import KINDS
from longspan.models import LanguageModel, build_run
from longspan.output import split_softmax
from longspan.training import run

STEPS = 40  # of the recorded 100, for time; the memory is full after 9
FILE = Path(__file__).parents[1] / "golden" / "sha_rnn_training.safetensors"


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def recorded() -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(FILE, "pt") as file:
        facts = json.loads(file.metadata()["facts"])
        return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118


def initial_weights(parameters: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    """The formula of the recording, by the original's names."""
    weights = {}
    for name, facts in parameters.items():
        shape, k = facts["shape"], facts["k"]
        if len(shape) == 2:
            scale = 0.125 if ".rnn." in name else 0.02
            # The factor amplifies the rounding of the sine, so it is the C library's, not torch's.
            waves = [43758.5453 * math.sin(12.9898 * (i + 1) + 78.233 * k) for i in range(math.prod(shape))]
            parts = torch.tensor([wave - math.floor(wave) for wave in waves], dtype=torch.float64)
            weights[name] = (scale * (2 * parts - 1)).view(shape)
        else:
            is_norm = ".ln" in name or ".qln." in name
            value = 1.0 if is_norm and name.endswith("weight") else 0.0
            weights[name] = torch.full(shape, value, dtype=torch.float64)
    return weights


def table(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "golden",
        "model": {
            "architecture": "sha-rnn",
            "num_layers": settings["layers"],
            "width": settings["width"],
            "inner_width": settings["inner_width"],
            "attention": "second-last",
            "memory_length": settings["memory_positions"],
        },
        "training": {
            "batch_size": settings["lanes"],
            "block_length": settings["block_length"],
            "block_jitter": True,
            "device": "cpu",
            "precision": "float32",  # no autocast; the weights decide the dtype
            "compile": False,
            "log_every": 1,
            "evaluate_every": 0,
            "checkpoint_every": 0,
        },
        "stage": [
            {
                "steps": STEPS,
                "optimizer": settings["optimizer"],
                "learning_rate": settings["learning_rate"],
                "warmup_steps": settings["warmup_steps"],
                "clip_norm": settings["clip_norm"],
                "weight_decay": settings["weight_decay"],
                "weight_decay_of": "all",
            }
        ],
        "evaluation": {"max_tokens": 100, "max_tokens_final": 100},
    }


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_a_training_of_the_original_is_repeated(optimizer, recorded, tmp_path, monkeypatch):
    tensors, facts = recorded
    settings, vocabulary_size = facts["settings"][optimizer], facts["settings"][optimizer]["vocabulary"]

    def build_with_recorded_weights(config: RunConfig, size: int) -> LanguageModel:
        model, original = build_run(config, size), KINDS["sha-rnn"]
        assert isinstance(config.model, ShaRnnConfig)
        weights = initial_weights(facts["parameters"])
        model.load_state_dict(original.parameters(weights, config.model, size))
        return model

    lengths = iter(tensors["block_lengths"].tolist())
    monkeypatch.setattr(split_softmax, "scores", F.linear)  # else logits are rounded to float32
    monkeypatch.setattr(run, "build_run", build_with_recorded_weights)
    monkeypatch.setattr(Lanes, "_draw_length", lambda *_: next(lengths))
    lines: list[dict[str, Any]] = []
    longspan.train(
        table(settings),
        {"train": tensors["train"].flatten(), "valid": tensors["train"][0]},
        tmp_path / "run",
        vocabulary_size=vocabulary_size,
        callback=lines.append,
    )
    losses = torch.tensor([line["loss"] for line in lines if line["kind"] == "train"])
    torch.testing.assert_close(losses, tensors[f"loss.{optimizer}"][:STEPS], rtol=0, atol=1e-12)
