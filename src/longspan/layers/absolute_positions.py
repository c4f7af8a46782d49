"""Learned absolute positions. Shapes: B batch, T block, D width."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.layers.block import Block
from longspan.state import State


class AbsolutePositions(Block):
    """out = dropout(h + p_n) for the n-th token of a text, n = 0, 1, ..., with one learned p for each n.

    The state counts the tokens that were read. There are no positions beyond `limit`.
    """

    def __init__(self, limit: int, width: int, *, dropout: float) -> None:
        super().__init__()
        self.table = nn.Embedding(limit, width)
        self.dropout = dropout

    def initial_state(self, batch_size: int) -> State:
        return State({"read": torch.zeros(batch_size, dtype=torch.long, device=self.table.weight.device)})

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        read_B, block = state.tensor("read"), h_BTD.shape[1]
        positions_BT = read_B[:, None] + torch.arange(block, device=read_B.device)
        out_BTD = F.dropout(h_BTD + self.table(positions_BT), self.dropout, self.training)
        return out_BTD, State({"read": read_B + block})
