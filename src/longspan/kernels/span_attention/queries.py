"""What queries ask for beyond themselves: biases of every head, in the content and in the distance."""

from __future__ import annotations

from torch import Tensor


def biased(q_BHTK: Tensor, bias_HK: Tensor | None) -> Tensor:
    return q_BHTK if bias_HK is None else q_BHTK + bias_HK.to(q_BHTK.dtype)[:, None]


def position_queries(q_BHTK: Tensor, bias_HK: Tensor | None, map_HKE: Tensor | None) -> Tensor:
    """What is multiplied with position keys, [B, H, T, K] or, mapped, [B, H, T, E]."""
    asked_BHTK = biased(q_BHTK, bias_HK)
    return asked_BHTK if map_HKE is None else asked_BHTK @ map_HKE
