"""Smear: a token takes in the embedding of the token before.

Shapes: B batch, T block, D width, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longspan.layers.block import Block, KeptStep
from longspan.layers.head_mixing import GATE_INPUTS
from longspan.state import State


class Smear(Block):
    """out_t = h_t + s sigmoid(w . h_t[:C]) h_{t-1}, with a learned scale s that begins at zero.

    The state holds the last row; a text begins with zeros.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.weight_C = nn.Parameter(torch.zeros(min(GATE_INPUTS, width)))
        self._width = width

    def initial_state(self, batch_size: int) -> State:
        return State({"before": self.weight_C.new_zeros(batch_size, 1, self._width)})

    def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"scalar": [self.scale, self.weight_C]}

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        earlier_BTD = torch.cat([state.tensor("before").to(h_BTD.dtype), h_BTD[:, :-1]], dim=1)
        gate_BT1 = (h_BTD[..., : len(self.weight_C)] * self.weight_C).sum(-1, keepdim=True).sigmoid()
        return h_BTD + self.scale * gate_BT1 * earlier_BTD, State({"before": h_BTD[:, -1:]})

    def step_from(self, state: State) -> KeptStep:
        return KeptStep(self, state)
