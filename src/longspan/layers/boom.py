"""SHA-RNN's feed-forward block. Shapes: B batch, T block, D width, N = inner width // D."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.layers.block import Block
from longspan.layers.dropout import dropout
from longspan.state import State


class Boom(Block):
    """out = LN(h) + dropout(sum_n u_n) with u = dropout(gelu(W LN'(h) + b)) cut into pieces u_n of width D.

    The sum replaces the second matrix of other feed-forward blocks. The residual has its own norm.
    """

    def __init__(self, width: int, inner_width: int, *, dropout: float, epsilon: float) -> None:
        super().__init__()
        self.residual_norm = nn.LayerNorm(width, epsilon)
        self.norm = nn.LayerNorm(width, epsilon)
        self.expand = nn.Linear(width, inner_width)
        self.dropout = dropout

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        width = h_BTD.shape[-1]
        whole = self.expand.out_features // width * width  # an incomplete last piece is not used
        inner = _gelu(F.linear(self.norm(h_BTD), self.expand.weight[:whole], self.expand.bias[:whole]))
        inner = dropout(inner, self.dropout, self.training)
        sum_BTD = torch.unflatten(inner, -1, (-1, width)).sum(dim=-2)
        return self.residual_norm(h_BTD) + dropout(sum_BTD, self.dropout, self.training), state


def _gelu(x: Tensor) -> Tensor:
    """The approximation that the original was trained with, not torch's gelu."""
    return x * torch.sigmoid(1.702 * x)
