"""The block that does nothing. Shapes: B batch, T block, D width."""

from __future__ import annotations

from torch import Tensor

from longspan.layers.block import Block
from longspan.state import State


class Identity(Block):
    """out = h."""

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        return h_BTD, state
