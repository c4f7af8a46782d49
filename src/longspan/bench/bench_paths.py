"""The two paths of a training step that are compared: reference and fast."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from longspan.kernels.dispatch import Path, forced
from longspan.layers.attention import Attention
from longspan.models import LanguageModel


@dataclass(frozen=True)
class Way:
    """Which backend operations use, and whether forward and backward pass are captured as CUDA graphs."""

    name: Literal["reference", "fast"]
    means: str
    path: Path | None = None
    captured: bool = False

    def taken(self) -> AbstractContextManager[None]:
        """Inside, models use this path."""
        return forced(self.path)


def ways_for(model: LanguageModel, device: torch.device) -> list[Way]:
    """The reference path and the fast path, which `longspan train` uses.

    Only the fast path if the two are the same: on a CPU they differ only in span attention.
    """
    if device.type == "cuda":
        return [
            Way("reference", "plain torch, every operation launched", "eager"),
            Way("fast", "fused kernels, forward and backward pass replayed as CUDA graphs", captured=True),
        ]
    if not any(isinstance(module, Attention) for module in model.modules()):
        return [Way("fast", "the only path: the model has no span attention")]
    return [
        Way("reference", "plain torch, heads with similar windows together", "eager"),
        Way("fast", "C++ where it is supported, every head over its own window"),
    ]
