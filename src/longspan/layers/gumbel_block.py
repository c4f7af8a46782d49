"""A block that is a mixture of candidate blocks with learned weights.

Shapes: B batch, T block, D width, K candidates.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import reduce
from typing import Literal

import torch
from torch import Tensor, nn

from longspan.layers.block import Block, checked
from longspan.layers.temperature import Temperature
from longspan.state import State


class GumbelBlock(Block):
    """out = sum_k w_k candidate_k(h),  w = softmax((log pi + g) / tau)  (Mandava et al., 2020, section 3).

    g is Gumbel noise in training, one draw per forward pass, and 0 in evaluation. With "straight-through"
    sampling the forward pass in training uses the one-hot vector of the largest w instead of w, and the
    backward pass uses the soft w.

    Every candidate has its own residual and norm, and its own branch of the state: attention remembers the
    block's input even if its weight is small. In evaluation, while `chosen` names a candidate, only that
    candidate is computed; the memories of the others are not used and do not change.
    """

    def __init__(
        self,
        candidates: Mapping[str, Block],
        temperature: Temperature,
        sampling: Literal["soft", "straight-through"],
    ) -> None:
        super().__init__()
        self.candidates = nn.ModuleDict(candidates)
        self.logits_K = nn.Parameter(torch.zeros(len(candidates)))  # log pi, up to a constant
        self.sampling = sampling
        self.chosen: str | None = None
        self._temperature = (temperature,)  # in a tuple: all blocks share it and the model owns it

    def initial_state(self, batch_size: int) -> State:
        return State({letter: block.initial_state(batch_size) for letter, block in self._blocks().items()})

    def shape_key(self) -> Hashable:
        return tuple(block.shape_key() for block in self._blocks().values())

    def compile_parts(self) -> None:
        for block in self._blocks().values():
            block.compile_parts()

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        if self.chosen is not None and not self.training:
            out_BTD, after = self.candidates[self.chosen](h_BTD, state.branch(self.chosen))
            return out_BTD, State({**state, self.chosen: after})
        results = {
            letter: checked(block(h_BTD, state.branch(letter)), block, f"'{letter}'", h_BTD)
            for letter, block in self.candidates.items()
        }
        # What the weights learn is a small difference of large sums: too small for half precision.
        exact = torch.promote_types(h_BTD.dtype, self.logits_K.dtype)
        weights = self._weights_K().to(exact).unbind()
        weighted = [w * out_BTD.to(exact) for w, (out_BTD, _) in zip(weights, results.values(), strict=True)]
        return reduce(torch.add, weighted), State({letter: after for letter, (_, after) in results.items()})

    def decoding_state(self, state: State) -> State:
        return State(
            {letter: block.decoding_state(state.branch(letter)) for letter, block in self._blocks().items()}
        )

    def _weights_K(self) -> Tensor:
        tau = self._temperature[0]()
        if not self.training:
            return (self.logits_K / tau).softmax(dim=0)
        gumbel_K = -torch.empty_like(self.logits_K).exponential_().log()
        w_K = ((self.logits_K + gumbel_K) / tau).softmax(dim=0)
        if self.sampling == "soft":
            return w_K
        one_hot_K = torch.zeros_like(w_K).scatter(0, w_K.argmax(dim=0, keepdim=True), 1.0)
        return one_hot_K + (w_K - w_K.detach())

    def _blocks(self) -> dict[str, Block]:
        return {letter: block for letter, block in self.candidates.items() if isinstance(block, Block)}
