"""The context curve and dynamic evaluation on a GPU: the numbers of the CPU, and of `evaluate`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from longspan.config import EvaluationConfig, ShaRnnConfig
from longspan.data import token_array
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.evaluation import context_curve, dynamic_evaluation
from longspan.models import build
from tests.using.tiny import tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOKENIZER = ByteTokenizer()
TEXT = token_array(np.random.default_rng(0).integers(32, 64, 700), TOKENIZER)


def test_the_curve_is_that_of_the_cpu() -> None:
    sizes: dict[str, Any] = {"batch_size": 3, "block_length": 16, "contexts": (4, 64), "scored_tokens": 90}
    nats = [
        [
            point.nats
            for point in context_curve(
                tiny_model().to(device), TEXT, tokenizer=TOKENIZER, device=device, **sizes
            ).points
        ]
        for device in ("cpu", "cuda")
    ]
    assert nats[1] == pytest.approx(nats[0], rel=1e-3)


def test_a_recurrent_network_follows_the_text() -> None:
    """cuDNN has gradients only for what it computed in training mode."""
    config = ShaRnnConfig(num_layers=2, width=32, inner_width=32)
    scores = [
        dynamic_evaluation(
            build(config, 256).to("cuda"),
            TEXT,
            tokenizer=TOKENIZER,
            config=EvaluationConfig(batch_size=2),
            block_length=16,
            rule="sgd",
            rate=rate,
            max_tokens=200,
            device="cuda",
        ).dynamic
        for rate in (0.0, 0.1)
    ]
    assert scores[1].nats < scores[0].nats


@pytest.mark.parametrize("rule", ["sgd", "rms"])
def test_dynamic_scores_are_those_of_the_cpu(rule: Any) -> None:
    def score(device: str, rate: float) -> Any:
        return dynamic_evaluation(
            tiny_model().to(device),
            TEXT,
            tokenizer=TOKENIZER,
            config=EvaluationConfig(batch_size=2),
            block_length=16,
            rule=rule,
            rate=rate,
            training=TEXT,
            max_tokens=200,
            device=device,
        )

    still = score("cuda", 0.0)
    assert still.dynamic == still.static
    rate = {"sgd": 0.1, "rms": 1e-4}[rule]
    moved = score("cuda", rate)
    assert moved.dynamic.nats != moved.static.nats
    assert moved.dynamic.nats == pytest.approx(score("cpu", rate).dynamic.nats, rel=1e-2)
