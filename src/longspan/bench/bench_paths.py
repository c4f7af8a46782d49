"""The two paths of a training step that are compared."""

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
    """Which path operations take, and whether the passes through the model are recorded."""

    name: Literal["reference", "fast"]
    means: str
    path: Path | None = None
    recorded: bool = False

    def taken(self) -> AbstractContextManager[None]:
        """Inside, models compute this way."""
        return forced(self.path)


def ways_for(model: LanguageModel, device: torch.device) -> list[Way]:
    """The reference path and then the fast path, which is what `longspan train` takes.

    There is only the latter where both are the same: on a CPU they differ in attention to spans alone.
    """
    if device.type == "cuda":
        return [
            Way("reference", "plain torch, every operation launched", "eager"),
            Way("fast", "kernels of our own, passes through the model recorded and replayed", recorded=True),
        ]
    if not any(isinstance(module, Attention) for module in model.modules()):
        return [Way("fast", "the only one, without attention to spans")]
    return [
        Way("reference", "plain torch, heads of similar windows together", "eager"),
        Way("fast", "compiled C++ where it applies, every head as far as it looks"),
    ]
