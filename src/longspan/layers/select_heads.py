"""Picking heads out of a tensor that has a dimension for them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def select_heads(x: Tensor, heads: list[int], dim: int = 0) -> Tensor:
    """What belongs to some heads, in this order; all heads in their own order need no copy."""
    if heads == list(range(x.shape[dim])):
        return x
    return x.index_select(dim, index_of(tuple(heads), x.device))


@cache  # for good: a recorded step knows where they lie
def index_of(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept on the device: a copy to it would have to wait, and could not be recorded."""
    with torch.inference_mode(False):  # whoever asks first, training will want it too
        return torch.tensor(heads, device=device)
