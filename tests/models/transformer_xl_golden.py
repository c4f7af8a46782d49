"""Recorded runs of Transformer-XL, the original's and Hugging Face's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from safetensors import safe_open
from torch import Tensor

from longspan.config import TransformerXLConfig
from longspan.interop import KINDS
from longspan.interop.translation import Tensors, Translation
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
    def original(self) -> Translation:
        return KINDS["hf-transfo-xl" if self.hugging_face else "transformer-xl"]

    @property
    def vocabulary_size(self) -> int:
        return self.facts["model"]["vocab_size" if self.hugging_face else "n_token"]

    @property
    def rounding(self) -> dict[str, float]:
        return self.facts["rounding"]

    def config(self, **changes: Any) -> TransformerXLConfig:
        """The model as it was built, or with other `mem_len`, `clamp_len` and `same_length`."""
        weights = {
            name.removeprefix("weights."): t
            for name, t in self.tensors.items()
            if name.startswith("weights.")
        }
        config = self.original.config(Tensors(_unprefixed(weights)), {**self.facts["model"], **changes})
        assert isinstance(config, TransformerXLConfig)
        return config

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
        start = f"{prefix}."
        found = {name[len(start) :]: t for name, t in self.tensors.items() if name.startswith(start)}
        return self.original.parameters(_unprefixed(found), self.config(), self.vocabulary_size)


def _unprefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
