"""Recorded runs of Transformer-XL, the original's and Hugging Face's, and the names of their weights here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from safetensors import safe_open
from torch import Tensor

from longspan.config import TransformerXLConfig
from longspan.config.transformer_xl import XLVocabularyConfig
from tests.models.golden import FOLDER

CASES = [
    "txl_basic",
    "txl_no_mem",
    "txl_prenorm_untied",
    "txl_same_length_clamp",
    "txl_adaptive_div1",
    "txl_adaptive_div1_noproj",
    "txl_adaptive_div2",
    "hf_transfo_xl_tie_r",
    "hf_transfo_xl_untie_r",
]
CASES_WITH_UPDATES = [
    "txl_prenorm_untied",
    "txl_adaptive_div1",
    "txl_adaptive_div2",
    "hf_transfo_xl_tie_r",
    "hf_transfo_xl_untie_r",
]


@dataclass(frozen=True)
class Golden:
    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    @staticmethod
    def load(case: str) -> Golden:
        with safe_open(FOLDER / f"{case}.safetensors", "pt") as file:
            facts = json.loads(file.metadata()["facts"])
            return Golden({name: file.get_tensor(name) for name in file.keys()}, facts)  # noqa: SIM118

    @property
    def hugging_face(self) -> bool:
        return "vocab_size" in self.facts["model"]

    @property
    def vocabulary_size(self) -> int:
        return self.facts["model"]["vocab_size" if self.hugging_face else "n_token"]

    @property
    def rounding(self) -> dict[str, float]:
        return self.facts["rounding"]

    def config(self, **changes: Any) -> TransformerXLConfig:
        """The model as it was built, or with other `mem_len`, `clamp_len` and `same_length`."""
        model = {**self.facts["model"], **changes}
        return TransformerXLConfig(
            num_layers=model["n_layer"],
            width=model["d_model"],
            num_heads=model["n_head"],
            head_width=model["d_head"],
            inner_width=model["d_inner"],
            norm="pre" if model["pre_lnorm"] else "post",
            memory_length=model["mem_len"],
            same_length=model["same_length"],
            clamp_length=model["clamp_len"] if model["clamp_len"] > 0 else None,
            start="zeros" if self.hugging_face else "empty",
            biases="per-layer" if model.get("untie_r") else "shared",
            vocabulary=XLVocabularyConfig(
                cutoffs=tuple(model["cutoffs"]),
                division=model["div_val"],
                table_width=model["d_embed"],
                tied=model.get("tie_weight", True),
                cluster_order="forward" if self.hugging_face else "from-end",
            ),
        )

    def blocks(self, group: str) -> list[tuple[Tensor, Tensor]]:
        """(inputs, targets), batch first; without memory the inputs begin before the targets."""
        count = sum(name.startswith(f"{group}.x.") for name in self.tensors)
        return [
            (self.batch_first(f"{group}.x.{k}"), self.batch_first(f"{group}.y.{k}")) for k in range(count)
        ]

    def batch_first(self, name: str) -> Tensor:
        return self.tensors[name] if self.hugging_face else self.tensors[name].transpose(0, 1)

    def parameters(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under `prefix` in this project's names and layouts."""
        found: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            if name.startswith(f"{prefix}.") and name != f"{prefix}.loss":
                found |= self._ours(name.removeprefix(f"{prefix}.").removeprefix("transformer."), tensor)
        return found

    def _ours(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """One tensor of the original may be several here."""
        whole = {
            "r_w_bias": "shared.biases.content_HK",
            "r_r_bias": "shared.biases.distance_HK",
            "crit.cluster_weight": "head.cluster_weight",
            "crit.cluster_bias": "head.cluster_bias",
        }
        if name in whole:
            return {whole[name]: tensor}
        first, kind, number, *rest = name.split(".")
        if first == "word_emb":
            return {f"embedding.{'tables' if kind == 'emb_layers' else 'projections'}.{number}": tensor}
        if kind == "out_projs":
            return {f"head.projections.{number}": tensor}
        if kind == "out_layers":
            kind = "tables" if rest == ["weight"] else "biases"
            if self.facts["model"]["div_val"] > 1:
                return {f"head.{kind}.{number}": tensor}
            bounds = [0, *self.facts["model"]["cutoffs"], self.vocabulary_size]
            return {f"head.{kind}.{i}": tensor[bounds[i] : bounds[i + 1]] for i in range(len(bounds) - 1)}
        return _in_layer(int(kind), ".".join([number, *rest]), tensor)


def _in_layer(layer: int, name: str, tensor: Tensor) -> dict[str, Tensor]:
    attention, feed_forward = f"blocks.{2 * layer}", f"blocks.{2 * layer + 1}"
    if name == "dec_attn.qkv_net.weight":
        parts = zip(("query", "key", "value"), tensor.chunk(3), strict=True)
        return {f"{attention}.{part}.weight": rows for part, rows in parts}
    ours = {
        "dec_attn.r_net.": f"{attention}.positions.project.",
        "dec_attn.r_w_bias": f"{attention}.positions.biases.content_HK",
        "dec_attn.r_r_bias": f"{attention}.positions.biases.distance_HK",
        "dec_attn.o_net.": f"{attention}.out.",
        "dec_attn.layer_norm.": f"{attention}.norm.",
        "pos_ff.CoreNet.0.": f"{feed_forward}.expand.",
        "pos_ff.CoreNet.3.": f"{feed_forward}.contract.",
        "pos_ff.layer_norm.": f"{feed_forward}.norm.",
    }
    return {next(new + name.removeprefix(old) for old, new in ours.items() if name.startswith(old)): tensor}
