"""QK-norm. Shapes: H heads, K head width."""

from __future__ import annotations

import torch
from torch import nn


class QueryKeyNorm(nn.Module):
    """q = g_h q / rms(q),  k = k / rms(k), in every head (Henry et al., 2020).

    Scores are then g_h sqrt(K) cos(q, k), independent of the norms of the weights. Each head learns its g,
    by default initially 1: scores are then as large as those of independent normal q and k. Used by
    `kernels/qk_norm_rope`.
    """

    def __init__(self, num_heads: int, initial_gain: float = 1.0) -> None:
        super().__init__()
        self.gain_H = nn.Parameter(torch.full((num_heads,), initial_gain))
