"""The feed-forward block. Shapes: B batch, T block, D width."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from longspan.kernels.linear import FixedProduct, relu_feed_forward
from longspan.layers.block import Block, Step
from longspan.layers.dropout import GrowingDropout, dropout
from longspan.layers.linear import Linear
from longspan.layers.post_norm import normed_sum
from longspan.state import State


class FeedForward(Block):
    """FF(u) = W2 dropout(activation(W1 u + b1)) + b2, with a residual; `output_dropout` acts on FF(u).

    Post-norm: out = LN(u + FF(u)). Pre-norm: out = u + FF(LN(u)). `norm` makes the norm that LN stands for.
    A `gated` one has W2 dropout(activation(W1 u + b1) (V u + c)) + b2 in its place (Shazeer, 2020).
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
            return h_BTD + self._feed_forward(self.norm(h_BTD)), state
        return normed_sum(self.norm, h_BTD, self._feed_forward(h_BTD)), state

    def _feed_forward(self, h_BTD: Tensor) -> Tensor:
        if self.activation is torch.relu and self.gate is None and not h_BTD.is_cuda:
            weights = (self.expand.weight, self.expand.bias, self.contract.weight, self.contract.bias)
            out = relu_feed_forward(h_BTD, *weights, dropout=self.dropout if self.training else 0.0)
            return dropout(out, self.output_dropout, self.training)
        inner = self.activation(self.expand(h_BTD))
        if self.gate is not None:
            inner = inner * self.gate(h_BTD)
        out = self.contract(dropout(inner, self.dropout, self.training))
        return dropout(out, self.output_dropout, self.training)

    def step_from(self, state: State) -> Step:
        expand, contract = (FixedProduct(layer.weight, layer.bias) for layer in (self.expand, self.contract))
        gate = None if self.gate is None else FixedProduct(self.gate.weight, self.gate.bias)

        def step(h_1BD: Tensor) -> Tensor:
            x_1BD = self.norm(h_1BD) if self.norm_first else h_1BD
            inner = self.activation(expand(x_1BD))
            if gate is not None:
                inner = inner * gate(x_1BD)
            out_1BD = contract(inner, onto=h_1BD)
            return out_1BD if self.norm_first else self.norm(out_1BD)

        return step


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al., 2021)."""
    return torch.relu(x).square()
