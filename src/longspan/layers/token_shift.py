"""Token shift: a feed-forward block that also reads the token before.

Shapes: B batch, T block, D width, C shifted channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.layers.block import RowStep
from longspan.layers.dropout import dropout
from longspan.layers.feed_forward import FeedForward, PreparedFeedForward
from longspan.state import State


class ShiftedFeedForward(FeedForward):
    """out_t = u_t + FF([x_{t-1}[:C]; x_t[C:]]) with x = LN(u): half of its input is of the token before.

    So the block sees pairs of tokens, without attention. RWKV (Peng et al., 2023) mixes the two tokens by
    learned weights instead. Always pre-norm. The state holds these channels of the last token; a text begins
    with zeros.
    """

    @property
    def shifted(self) -> int:
        """C."""
        return self.expand.in_features // 2

    def initial_state(self, batch_size: int) -> State:
        return State({"before": self.expand.weight.new_zeros(batch_size, 1, self.shifted)})

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        x_BTD, shifted = self.norm(h_BTD), self.shifted
        first_B1C = state.tensor("before").to(x_BTD.dtype)
        last_B1C = x_BTD[:, -1:, :shifted].clone()  # else the state keeps all of x in memory
        before_BTC = torch.cat([first_B1C, x_BTD[:, :-1, :shifted]], dim=1)
        out_BTD = self._feed_forward(torch.cat([before_BTC, x_BTD[..., shifted:]], dim=-1))
        return h_BTD + dropout(out_BTD, self.output_dropout, self.training), State({"before": last_B1C})

    def step_from(self, state: State) -> RowStep:
        return _ShiftedStep(self, self.prepared(), state)


class _ShiftedStep(RowStep):
    """Keeps the channels of the last token in a buffer that stays in its place."""

    def __init__(self, block: ShiftedFeedForward, prepared: PreparedFeedForward, state: State) -> None:
        self._block, self._prepared = block, prepared
        # In the precision of the weights: the text may have been read in another one.
        self._before_1BC = state.tensor("before").transpose(0, 1).to(block.expand.weight.dtype, copy=True)

    def __call__(self, h_1BD: Tensor, *more: Tensor) -> Tensor:
        x_1BD, shifted = self._block.norm(h_1BD), self._block.shifted
        out_1BD = self._prepared(torch.cat([self._before_1BC, x_1BD[..., shifted:]], dim=-1), h_1BD)
        self._before_1BC.copy_(x_1BD[..., :shifted])
        return out_1BD

    def begin(self, state: State) -> _ShiftedStep:
        return _ShiftedStep(self._block, self._prepared, state)

    def put(self, row: int, source: Any, source_row: int = 0) -> None:
        assert isinstance(source, _ShiftedStep)
        self._before_1BC[:, row] = source._before_1BC[:, source_row]
