"""The norms of many tensors at once."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.compiler.disable  # compiled, stacking would launch one kernel per tensor
def norms(tensors: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """Their 2-norms, [N], on the device."""
    return torch.stack(torch._foreach_norm(tensors))
