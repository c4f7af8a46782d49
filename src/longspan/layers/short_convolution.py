"""A convolution over the last tokens. Shapes: B batch, T block, D width, N positions, S = N - 1 + T."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from longspan.layers.block import Block, KeptStep
from longspan.state import State


class ShortConvolution(Block):
    """out_t = h_t + sum_n w_n * N(h_{t-n}), n = 0 ... N - 1, with one weight per n and channel.

    Attention need not find the tokens right before a token (Allen-Zhu, 2025). Weights begin at zero.
    The state holds the last N - 1 normed rows; a text begins with zeros.
    """

    def __init__(self, width: int, size: int, *, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(width)
        self.weight_ND = nn.Parameter(torch.zeros(size, width))

    def initial_state(self, batch_size: int) -> State:
        size, width = self.weight_ND.shape
        return State({"before": self.weight_ND.new_zeros(batch_size, size - 1, width)})

    def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"no_decay": [self.weight_ND]}

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        x_BTD, before_BND = self.norm(h_BTD), state.tensor("before")
        x_BSD = torch.cat([before_BND.to(x_BTD.dtype), x_BTD], dim=1)
        block, remembered = x_BTD.shape[1], before_BND.shape[1]
        for n, weight_D in enumerate(self.weight_ND):
            h_BTD = torch.addcmul(h_BTD, weight_D, x_BSD[:, remembered - n :][:, :block])
        return h_BTD, State({"before": x_BSD[:, block:].clone()})  # not all of x

    def step_from(self, state: State) -> KeptStep:
        return KeptStep(self, state)
