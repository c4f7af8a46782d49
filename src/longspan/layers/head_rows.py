"""Picking heads out of a tensor whose first dimension counts them."""

from __future__ import annotations

from torch import Tensor


def of_heads(x: Tensor, heads: list[int]) -> Tensor:
    """The rows of some heads in this order; all heads in their own order need no copy."""
    return x if heads == list(range(x.shape[0])) else x[heads]
