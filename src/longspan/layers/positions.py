"""How distance counts in attention. Shapes: L longest distance, K head width."""

from __future__ import annotations

import torch
from torch import nn


class LearnedDistanceKeys(nn.Module):
    """One learned key per distance, shared by all heads of every layer. The model owns this module.

    A query at distance d from a key adds q . p_d to its score. Row i belongs to the i-th nearest distance.
    """

    def __init__(self, limit: int, head_width: int) -> None:
        super().__init__()
        self.keys_LK = nn.Parameter(torch.randn(limit, head_width))
