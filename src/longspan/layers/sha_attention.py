"""Attention with a single head. Shapes: B batch, T block, M memory, S keys, D width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.flops import Shape, flops
from longspan.layers.block import Block
from longspan.layers.dropout import dropout
from longspan.layers.recording import keep
from longspan.state import State


class SingleHeadAttention(Block):
    """out = x + dropout(softmax(q kᵀ / √D) v) with x = LN(h) and g = [memory; LN'(h)]:

        q = σ(s) LN(Wq x + b),    k = σ(s') g,    v = gate g

    Keys and values are the scaled memory, without matrices of their own, and there are no positions. The
    scales are applied to the query and to the result, so that the memory itself is used as keys and values.

    Attention reaches over `memory_length` positions, the block included: a block of T tokens sees the last
    `memory_length` - T rows of the memory, and the others are dropped. A text that has read fewer tokens has
    fewer rows: `filled` counts them, and rows before them are not seen.
    """

    def __init__(self, width: int, *, memory_length: int, dropout: float, epsilon: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, epsilon)
        self.memory_norm = nn.LayerNorm(width, epsilon)
        self.query = nn.Linear(width, width)
        self.query_norm = nn.LayerNorm(width, epsilon)
        self.query_scale_D = nn.Parameter(torch.zeros(width))
        self.key_scale_D = nn.Parameter(torch.zeros(width))
        self.value_gate: ValueGate | FixedGate = ValueGate(width)
        self.memory_length = memory_length
        self.dropout = dropout

    def initial_state(self, batch_size: int) -> State:
        weight = self.query.weight
        return State(
            {
                "memory": weight.new_zeros(batch_size, self.memory_length, weight.shape[1]),
                "filled": torch.zeros(batch_size, dtype=torch.int64, device=weight.device),
            }
        )

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        x_BTD, filled_B = self.norm(h_BTD), state.tensor("filled")
        past_BMD = _last(state.tensor("memory"), max(0, self.memory_length - h_BTD.shape[1]))
        parts = [part for part in (past_BMD, self.memory_norm(h_BTD)) if part.shape[1]]
        g_BSD = torch.cat(parts, dim=1)
        keys = parts if h_BTD.is_cuda else [g_BSD]
        attended_BTD = self._attend(x_BTD, keys, [self._drop(k) for k in keys], filled_B)
        after = State(
            {
                "memory": _last(g_BSD, self.memory_length),
                "filled": (filled_B + h_BTD.shape[1]).clamp(max=self.memory_length),
            }
        )
        return x_BTD + self._drop(attended_BTD), after

    def collapse(self) -> None:
        """Replace the gate by the vector that it computes from its weights: the same output, no training."""
        self.value_gate = FixedGate(self.value_gate().detach())

    def _attend(
        self, x_BTD: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], filled_B: Tensor
    ) -> Tensor:
        """Attention to g, given in one part or in two: the memory and the block."""
        q_BTD = self._drop(torch.sigmoid(self.query_scale_D) * self.query_norm(self.query(x_BTD)))
        attend = _attend_by_products if x_BTD.is_cuda else _attend_by_torch
        q_BTD = torch.sigmoid(self.key_scale_D) * q_BTD
        visible_BTS = _visible(x_BTD.shape[1], sum(k.shape[1] for k in keys), filled_B)
        keep(self, q_BTD, keys, visible_BTS)
        attended_BTD = attend(q_BTD, keys, values, visible_BTS, self.dropout if self.training else 0.0)
        return self.value_gate() * attended_BTD

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)

    def flops(self, shape: Shape) -> float:
        """The query, scores and weighted sum over all keys, and the gate once for all tokens."""
        keys, width = max(self.memory_length, shape.block_length), self.query.in_features
        gate = flops(self.value_gate, shape) / (shape.batch_size * shape.block_length)
        return flops(self.query, shape) + 2 * 2 * keys * width + gate


class ValueGate(nn.Module):
    """gate = σ(f) tanh(c) with [c; f] = W σ(s) + b: a vector, learned through more weights than it has."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_D = nn.Parameter(torch.zeros(width))
        self.mix = nn.Linear(width, 2 * width)

    def forward(self) -> Tensor:
        content_D, forget_D = self.mix(torch.sigmoid(self.scale_D)).chunk(2)
        return torch.sigmoid(forget_D) * torch.tanh(content_D)


class FixedGate(nn.Module):
    """The value of a gate that is no longer trained."""

    gate_D: Tensor

    def __init__(self, gate_D: Tensor) -> None:
        super().__init__()
        self.register_buffer("gate_D", gate_D)

    def forward(self) -> Tensor:
        return self.gate_D


def _attend_by_torch(
    q_BTD: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], visible_BTS: Tensor, dropped: float
) -> Tensor:
    k_BSD, v_BSD = (one[0] if len(one) == 1 else torch.cat(list(one), dim=1) for one in (keys, values))
    return F.scaled_dot_product_attention(q_BTD, k_BSD, v_BSD, attn_mask=visible_BTS, dropout_p=dropped)


def _attend_by_products(
    q_BTD: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], visible_BTS: Tensor, dropped: float
) -> Tensor:
    """The same in single operations. torch has no GPU kernel for a head this wide and falls back to products
    in full precision.

    Memory and block are separate, since only the block needs gradients.
    """
    q_BTD = q_BTD / math.sqrt(q_BTD.shape[-1])
    visible = visible_BTS.split([k.shape[1] for k in keys], dim=-1)
    scores = [q_BTD @ k.mT for k in keys]
    totals = [_seen(s, v).detach().logsumexp(-1, keepdim=True) for s, v in zip(scores, visible, strict=True)]
    total_BT1 = torch.cat(totals, dim=-1).logsumexp(-1, keepdim=True)
    weights, sums = zip(
        *(_weights(s, v, total_BT1) for s, v in zip(scores, visible, strict=True)), strict=True
    )
    attended = [dropout(w, dropped, True).to(v.dtype) @ v for w, v in zip(weights, values, strict=True)]
    # The sum of all weights is 1 up to rounding. Dividing by it matters for the gradient: the term that a
    # softmax subtracts from all scores of a row then follows from the row's output.
    return reduce(torch.add, attended) / reduce(torch.add, sums)


def _seen(scores_BTS: Tensor, visible_BTS: Tensor) -> Tensor:
    full = torch.promote_types(scores_BTS.dtype, torch.float32)
    return scores_BTS.to(full).masked_fill(~visible_BTS, -math.inf)


def _weights(scores_BTS: Tensor, visible_BTS: Tensor, total_BT1: Tensor) -> tuple[Tensor, Tensor]:
    """exp(scores - total), and its sum over the keys."""
    return _Weights.apply(scores_BTS, visible_BTS, total_BT1)  # type: ignore[no-untyped-call]


class _Weights(torch.autograd.Function):
    """Saves nothing for the backward pass but the weights, in the precision of the scores."""

    @staticmethod
    def forward(
        ctx: Any, scores_BTS: Tensor, visible_BTS: Tensor, total_BT1: Tensor
    ) -> tuple[Tensor, Tensor]:
        weights_BTS = torch.exp(_seen(scores_BTS, visible_BTS) - total_BT1)
        # torch 2.11 compiles a conversion that changes nothing without its gradient.
        if weights_BTS.dtype != scores_BTS.dtype:
            weights_BTS = weights_BTS.to(scores_BTS.dtype)
        ctx.save_for_backward(weights_BTS)
        return weights_BTS, weights_BTS.sum(-1, keepdim=True, dtype=total_BT1.dtype)

    @staticmethod
    def backward(ctx: Any, dweights_BTS: Tensor, dsum_BT1: Tensor) -> tuple[Tensor, None, None]:
        (weights_BTS,) = ctx.saved_tensors
        return (weights_BTS * (dweights_BTS + dsum_BT1)).to(weights_BTS.dtype), None, None


def _last(x_BMD: Tensor, rows: int) -> Tensor:
    return x_BMD[:, max(0, x_BMD.shape[1] - rows) :]


def _visible(block: int, keys: int, filled_B: Tensor) -> Tensor:
    """[B, T, S]: a position sees itself and everything before it in its text."""
    s_S = torch.arange(block - keys, block, device=filled_B.device)  # the block begins at 0
    t_T1 = torch.arange(block, device=filled_B.device)[:, None]
    return (s_S <= t_T1) & (s_S >= -filled_B[:, None])[:, None]
