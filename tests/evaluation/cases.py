"""Evaluations for one process and for several processes, where every rank writes a file of scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from longspan import distributed
from longspan.config import EvaluationConfig
from longspan.data import token_array
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.evaluation import context_curve, evaluate
from longspan.evaluation.protocols import PROTOCOLS
from longspan.models import LanguageModel
from longspan.training import parallel
from tests.using.tiny import tiny_model

TOKENS = np.random.default_rng(0).integers(32, 64, 131)
CASES: dict[str, dict[str, Any]] = {
    f"{protocol}, {lanes} lanes": {"protocol": protocol, "batch_size": lanes}
    for protocol in PROTOCOLS
    for lanes in (3, 4, 8)
} | {
    "one lane": {"batch_size": 1},
    "by position": {"batch_size": 3, "by_position": True},
    "fairseq by position": {"protocol": "fairseq", "batch_size": 3, "by_position": True},
    "without memory": {"batch_size": 5, "memory": False},
    "first tokens": {"batch_size": 5, "max_tokens": 50},
}
SHARDED = ("every-token, 3 lanes", "one lane", "without memory")


def score(model: LanguageModel, case: dict[str, Any]) -> dict[str, Any]:
    """The figures of a score, and the numbers of tokens that were told on the way."""
    chosen = {name: value for name, value in case.items() if name in ("protocol", "batch_size")}
    told: list[tuple[int, int]] = []
    result = evaluate(
        model,
        token_array(TOKENS, ByteTokenizer()),
        tokenizer=ByteTokenizer(),
        config=EvaluationConfig(**chosen),
        block_length=8,
        device="cpu",
        progress=lambda done, total: told.append((done, total)),
        **{name: value for name, value in case.items() if name not in chosen},
    )
    return result.figures() | {"told": told}


def curve(model: LanguageModel) -> dict[str, Any]:
    """The context curve, of which ranks read parts of every batch of rows."""
    text = token_array(TOKENS, ByteTokenizer())
    sizes: dict[str, Any] = {"batch_size": 3, "block_length": 8, "contexts": (1, 8, 16), "scored_tokens": 40}
    return context_curve(model, text, tokenizer=ByteTokenizer(), device="cpu", **sizes).figures()


def _of_sharded_model() -> dict[str, Any]:
    """In a function: the model must be gone before its process group is."""
    sharded = tiny_model()
    parallel.shard(sharded)
    found = {f"sharded: {name}": score(sharded, CASES[name]) for name in SHARDED}
    assert all(isinstance(weight, DTensor) for weight in sharded.parameters() if weight.ndim > 1)
    return found | {"sharded: curve": curve(sharded)}


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    with distributed.joined(torch.device("cpu"), 60):
        rank, model = distributed.rank(), tiny_model()
        for name, case in CASES.items():
            found[name] = score(model, case)
        found["curve"] = curve(model)
    with distributed.joined(torch.device("cpu"), 60):  # a process may join again
        found |= _of_sharded_model()
    (folder / f"{rank}.json").write_text(json.dumps(found))
