"""Queries and keys of one length. Shapes: H heads, K head width."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.layers.head_rows import of_heads

EPSILON = 1e-6


class QueryKeyNorm(nn.Module):
    """q = g_h q / rms(q),  k = k / rms(k), in every head (Henry et al., 2020).

    Scores are then g_h sqrt(K) cos(q, k), whatever the weights have grown to. Each head learns its g, which
    begins at 1: scores begin as large as those of independent normal q and k.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.gain_H = nn.Parameter(torch.ones(num_heads))

    def queries(self, q_BTHK: Tensor, heads: list[int]) -> Tensor:
        """Normed, with the gains of these heads."""
        return self.keys(q_BTHK) * of_heads(self.gain_H, heads)[:, None].to(q_BTHK.dtype)

    def keys(self, k_BTHK: Tensor) -> Tensor:
        return F.rms_norm(k_BTHK, k_BTHK.shape[-1:], eps=EPSILON).to(k_BTHK.dtype)
