"""Recorded runs of the original adaptive-span code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from longspan.config import ModelConfig
from longspan.interop import KINDS
from longspan.interop.translation import Tensors

FOLDER = Path(__file__).parent.parent / "golden"
ORIGINAL = KINDS["adaptive-span"]
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
        start = f"{prefix}."
        found = {name[len(start) :]: t for name, t in self.tensors.items() if name.startswith(start)}
        return ORIGINAL.parameters(found, self.config(), self.original["data_params"]["vocab_size"])

    def blocks(self) -> list[tuple[Tensor, Tensor]]:
        """(inputs, targets) of every block of the recorded stream."""
        length, data = self.original["model_params"]["block_size"], self.tensors["data"]
        return [
            (data[:, start : start + length], data[:, start + 1 : start + length + 1])
            for start in range(0, data.shape[1] - 1, length)
        ]

    def config(self) -> ModelConfig:
        weights = {
            name.removeprefix("weights."): t
            for name, t in self.tensors.items()
            if name.startswith("weights.")
        }
        options = {name: value for group in ORIGINAL.groups for name, value in self.original[group].items()}
        return ORIGINAL.config(Tensors(weights), options)


def close(found: Tensor, expected: Tensor, rounding: float, what: str) -> None:
    """Within five times the rounding that the original itself shows against float64."""
    error = (found.double() - expected.double()).abs().max().item()
    assert torch.isfinite(found).all(), what
    assert error <= 5 * rounding, f"{what}: {error:.2e} is more than 5 x {rounding:.2e}"
