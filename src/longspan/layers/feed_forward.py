"""The feed-forward block. Shapes: B batch, T block, D width."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TypeAlias

import torch
from torch import Tensor, nn

from longspan.kernels.linear import FixedProduct
from longspan.layers.block import Block, MemorylessStep, RowStep
from longspan.layers.dropout import GrowingDropout, dropout
from longspan.layers.linear import Linear
from longspan.layers.post_norm import kernels_for, normed_sum
from longspan.layers.projections import product_dtype
from longspan.state import State

PreparedFeedForward: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
"""From the input of FF and the residual, [1, B, D] both, to their sum after FF."""


class FeedForward(Block):
    """FF(u) = W2 dropout(activation(W1 u + b1)) + b2, with a residual; `output_dropout` acts on FF(u).

    Post-norm: out = LN(u + FF(u)). Pre-norm: out = u + FF(LN(u)). `norm` creates the norm LN.
    With `gated`, FF(u) = W2 dropout(activation(W1 u + b1) (V u + c)) + b2 (Shazeer, 2020).
    """

    def __init__(
        self,
        width: int,
        inner_width: int,
        *,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        dropout: float,
        output_dropout: float | GrowingDropout = 0.0,
        norm_first: bool,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        gated: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.expand = Linear(width, inner_width, bias=bias)
        self.gate = Linear(width, inner_width, bias=bias) if gated else None
        self.contract = Linear(inner_width, width, bias=bias)
        self.norm = norm(width)
        self.activation = activation
        self.dropout = dropout
        self.output_dropout = output_dropout
        self.norm_first = norm_first

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        if self.norm_first:
            out_BTD = self._feed_forward(self.norm(h_BTD))
            return h_BTD + dropout(out_BTD, self.output_dropout, self.training), state
        if (kernels := self._kernels()) is not None:
            dropouts = (self.dropout, self.output_dropout) if self.training else (0.0, 0.0)
            norm = kernels.Norm(self.norm.weight, self.norm.bias, self.norm.eps, dropouts[1])
            weights = self.expand.weight, self.expand.bias, self.contract.weight, self.contract.bias
            after_BTD: Tensor = kernels.feed_forward(
                h_BTD, *weights, norm, dropout=dropouts[0], dtype=product_dtype(h_BTD)
            )
            return after_BTD, state
        out_BTD = self._feed_forward(h_BTD)
        return normed_sum(self.norm, h_BTD, out_BTD, self.output_dropout, training=self.training), state

    def compile_parts(self) -> None:
        if self.norm_first or self._kernels() is None:
            super().compile_parts()

    def _feed_forward(self, h_BTD: Tensor) -> Tensor:
        inner = self.activation(self.expand(h_BTD))
        if self.gate is not None:
            inner = inner * self.gate(h_BTD)
        return self.contract(dropout(inner, self.dropout, self.training))

    def _kernels(self) -> ModuleType | None:
        """The kernels for a whole post-norm block, if there are any for its options and device."""
        if self.activation is not torch.relu or self.gate is not None or self.expand.bias is None:
            return None
        return kernels_for(self.norm, self.expand.weight, self.output_dropout)

    def prepared(self) -> PreparedFeedForward:
        """FF of single tokens, onto a residual, while the weights are fixed."""
        expand, contract = (FixedProduct(layer.weight, layer.bias) for layer in (self.expand, self.contract))
        gate = None if self.gate is None else FixedProduct(self.gate.weight, self.gate.bias)

        def read(x_1BD: Tensor, onto_1BD: Tensor) -> Tensor:
            inner = expand(x_1BD, activation=self.activation)
            if gate is not None:
                inner = inner * gate(x_1BD)
            return contract(inner, onto=onto_1BD)

        return read

    def step_from(self, state: State) -> RowStep:
        read = self.prepared()

        def step(h_1BD: Tensor) -> Tensor:
            if self.norm_first:
                return read(self.norm(h_1BD), h_1BD)
            out_1BD: Tensor = self.norm(read(h_1BD, h_1BD))
            return out_1BD

        return MemorylessStep(step)
