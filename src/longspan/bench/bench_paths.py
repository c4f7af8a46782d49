"""The two paths of a training step that are compared: reference and fast."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from longspan.kernels import dispatch
from longspan.layers.attention import Attention
from longspan.models import LanguageModel


@dataclass(frozen=True)
class BenchPath:
    """Which backend operations use, and whether forward and backward pass are captured as CUDA graphs."""

    name: Literal["reference", "fast"]
    means: str
    path: dispatch.Path | None = None
    captured: bool = False

    def forced(self) -> AbstractContextManager[None]:
        """Inside, models use the backends of this path."""
        return dispatch.forced(self.path)


def paths_for(model: LanguageModel, device: torch.device) -> list[BenchPath]:
    """The reference path and the fast path, which `longspan train` uses.

    Only the fast path if the two are the same: on a CPU they differ only in span attention.
    """
    if device.type == "cuda":
        return [
            BenchPath("reference", "plain torch, every operation launched", "eager"),
            BenchPath(
                "fast", "Triton kernels, forward and backward pass replayed as CUDA graphs", captured=True
            ),
        ]
    if not any(isinstance(module, Attention) for module in model.modules()):
        return [BenchPath("fast", "the only path: the model has no span attention")]
    return [
        BenchPath("reference", "plain torch, heads with similar windows together", "eager"),
        BenchPath("fast", "C++ where it is supported, every head over its own window"),
    ]
