"""Selecting and ordering heads in a tensor that has a dimension for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor


def select_heads(x: Tensor, heads: list[int], dim: int = 0) -> Tensor:
    """The entries of some heads, in this order; all heads in their own order need no copy."""
    if heads == list(range(x.shape[dim])):
        return x
    return x.index_select(dim, index_of(tuple(heads), x.device))


def indices_of(kinds: Iterable[int], heads: Sequence[int], num_heads: int) -> list[int]:
    """The indices of some heads in a row of all heads' queries, then all keys, or of other kinds."""
    return [kind * num_heads + head for kind in kinds for head in heads]


def inverse(order: list[int]) -> list[int]:
    """The index of every head in this order."""
    return sorted(range(len(order)), key=order.__getitem__)


@cache  # never freed: a CUDA graph reads them at their address
def index_of(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept on the device: a copy from the host would synchronise, and could not be captured."""
    with torch.inference_mode(False):  # the first call may be in inference mode, a later one in training
        return torch.tensor(heads, device=device)
