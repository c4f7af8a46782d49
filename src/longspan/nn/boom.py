"""Boom for plain tensors. Shapes: B batch, T block, D width."""

from __future__ import annotations

from torch import Tensor, nn

from longspan.layers import boom
from longspan.state import State


class Boom(nn.Module):
    """SHA-RNN's feed-forward block: out = LN(x) + dropout(sum_n u_n), u = dropout(gelu(W LN'(x) + b)).

    u is cut into pieces u_n of width D, and their sum replaces the second matrix. [B, T, D] -> [B, T, D].
    """

    def __init__(self, width: int, inner_width: int, *, dropout: float = 0.0, epsilon: float = 1e-12) -> None:
        super().__init__()
        self.block = boom.Boom(width, inner_width, dropout=dropout, epsilon=epsilon)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out_BTD, _ = self.block(x_BTD, State({}))
        return out_BTD
