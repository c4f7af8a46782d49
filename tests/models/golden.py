"""Recorded runs of the original adaptive-span code, and the names its weights have here."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from longspan.config import (
    AdaptiveSpanConfig,
    AllAttentionConfig,
    ModelConfig,
    SpanConfig,
    VocabularyConfig,
)

FOLDER = Path(__file__).parent.parent / "golden"
CASES = [
    "adaptive_span_basic",
    "adaptive_span_nocache",
    "adaptive_span_trim",
    "fixed_span",
    "fixed_span_short",
    "all_attention",
    "all_attention_adaptive",
]


@dataclass(frozen=True)
class Golden:
    tensors: dict[str, Tensor]
    original: dict[str, Any]
    updates_before: int
    rounding: dict[str, float]

    @staticmethod
    def load(case: str) -> Golden:
        with safe_open(FOLDER / f"{case}.safetensors", "pt") as file:
            facts = json.loads(file.metadata()["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return Golden(tensors, facts["config"], facts["updates_before"], facts["rounding"])

    def parameters(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under `prefix` in this project's names and layouts."""
        return {
            ours: _our_layout(name, self.tensors[f"{prefix}.{name}"])
            for name, ours in self.names().items()
            if f"{prefix}.{name}" in self.tensors
        }

    def names(self) -> dict[str, str]:
        """The original's parameter names -> ours."""
        heads = (name.removeprefix("weights.") for name in self.tensors if name.startswith("weights."))
        return {name: _our_name(name, 1 if self.num_slots else 2) for name in heads}

    def blocks(self) -> list[tuple[Tensor, Tensor]]:
        """(inputs, targets) of every block of the recorded stream."""
        length, data = self.original["model_params"]["block_size"], self.tensors["data"]
        return [
            (data[:, start : start + length], data[:, start + 1 : start + length + 1])
            for start in range(0, data.shape[1] - 1, length)
        ]

    def config(self) -> ModelConfig:
        model, span = self.original["model_params"], self.original["adapt_span_params"]
        span_config = SpanConfig(
            kind="learned" if span["adapt_span_enabled"] else "fixed",
            limit=model["attn_span"],
            ramp=span["adapt_span_ramp"],
            penalty=span["adapt_span_loss"],
            memory="adaptive" if span["adapt_span_cache"] else "full",
            softmax_over="layer",
        )
        common = {
            "num_layers": model["nb_layers"],
            "width": model["hidden_size"],
            "num_heads": model["nb_heads"],
            "dropout": model["dropout"],
            "embedding_dropout": model["emb_dropout"],
            "span": span_config,
            "vocabulary": self._vocabulary(),
        }
        if self.num_slots:
            return AllAttentionConfig(num_slots=self.num_slots, **common)
        return AdaptiveSpanConfig(inner_width=model["inner_hidden_size"], **common)

    def _vocabulary(self) -> VocabularyConfig:
        adaptive = self.original["adapt_io_params"]
        if not adaptive["adapt_io_enabled"]:
            return VocabularyConfig()
        return VocabularyConfig(
            cutoffs=tuple(adaptive["adapt_io_cutoffs"]),
            division=adaptive["adapt_io_divval"],
            tied=adaptive["adapt_io_tied"],
        )

    @property
    def num_slots(self) -> int:
        return self.original["pers_mem_params"]["pers_mem_size"]


def _our_name(name: str, blocks_per_layer: int) -> str:
    whole = {
        "key_pe": "shared.positions.keys_LK",
        "in_emb.weight": "embedding.weight",
        "out_emb.weight": "head.scores.weight",
        "out_emb.bias": "head.scores.bias",
        "out_emb.cluster_proj.weight": "head.cluster_weight",
        "out_emb.cluster_proj.bias": "head.cluster_bias",
    }
    if name in whole:
        return whole[name]
    if cluster := re.fullmatch(r"(in|out)_emb\.(\w+)\.(\d+)(\.bias)?.*", name):
        side, kind, number, bias = cluster.groups()
        part = "biases" if bias else "projections" if kind.endswith("projs") else "tables"
        return f"{'embedding' if side == 'in' else 'head'}.{part}.{number}"
    _, layer, rest = name.split(".", 2)
    first = blocks_per_layer * int(layer)
    attention, feed_forward = f"blocks.{first}", f"blocks.{first + 1}"
    parts = {
        "attn.proj_query.": f"{attention}.query.",
        "attn.proj_key.": f"{attention}.key.",
        "attn.proj_val.": f"{attention}.value.",
        "attn.proj_out.": f"{attention}.out.",
        "attn.attn.adaptive_span._mask.current_val": f"{attention}.span.fraction_H",
        "attn.attn.persistent_memory.key": f"{attention}.slots.keys_HPK",
        "attn.attn.persistent_memory.val": f"{attention}.slots.values_HPK",
        "norm1.": f"{attention}.norm.",
        "ff.fc1.": f"{feed_forward}.expand.",
        "ff.fc2.": f"{feed_forward}.contract.",
        "norm2.": f"{feed_forward}.norm.",
    }
    return next(ours + rest.removeprefix(theirs) for theirs, ours in parts.items() if rest.startswith(theirs))


def _our_layout(name: str, tensor: Tensor) -> Tensor:
    if name == "key_pe":  # [1, K, L] oldest first -> [L, K] nearest first
        return tensor[0].mT.flip(0).contiguous()
    if name.endswith("current_val"):
        return tensor.flatten()
    if name.endswith("persistent_memory.key"):  # [H, K, P] -> [H, P, K]
        return tensor.mT.contiguous()
    return tensor


def close(found: Tensor, expected: Tensor, rounding: float, what: str) -> None:
    """Within five times the rounding that the original itself shows against float64."""
    error = (found.double() - expected.double()).abs().max().item()
    assert torch.isfinite(found).all(), what
    assert error <= 5 * rounding, f"{what}: {error:.2e} is more than 5 x {rounding:.2e}"
