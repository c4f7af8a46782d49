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
from longspan.layers.chunks import ChunkReader, ReadsChunks
from longspan.layers.dropout import dropout
from longspan.layers.recording import keep
from longspan.state import State


class SingleHeadAttention(ReadsChunks):
    """out = x + dropout(softmax(q kᵀ / √D) v) with x = LN(h) and g = [memory; LN'(h)]:

        q = σ(s) LN(Wq x + b),    k = σ(s') g,    v = gate g

    Keys and values are the scaled memory, without matrices of their own, and there are no positions. So the
    scales are applied to the query and to the result instead of the memory.

    Attention covers `memory_length` positions, including the block: a block of T tokens sees the last
    `memory_length` - T rows of the memory, and the others are removed. At the beginning of a text fewer rows
    are filled: `filled` counts them, and the others are not seen.
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
        self._recalled, self._chunk = _recalled, _chunk

    def initial_state(self, batch_size: int) -> State:
        weight = self.query.weight
        return State(
            {
                "memory": weight.new_zeros(batch_size, self.memory_length, weight.shape[1]),
                "filled": torch.zeros(batch_size, dtype=torch.int64, device=weight.device),
            }
        )

    def compile_parts(self) -> None:
        self.compile()
        self._recalled, self._chunk = torch.compile(_recalled), torch.compile(_chunk)

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        x_BTD, filled_B = self.norm(h_BTD), state.tensor("filled")
        past_BMD = self.not_forgotten(state.tensor("memory"), h_BTD.shape[1])
        pieces = [piece for piece in (past_BMD, self.memory_norm(h_BTD)) if piece.shape[1]]
        g_BSD = torch.cat(pieces, dim=1)
        keys = pieces if h_BTD.is_cuda else [g_BSD]
        attended_BTD = self.attend(x_BTD, keys, [self.drop(k) for k in keys], filled_B)
        return x_BTD + self.drop(attended_BTD), self.remembered(g_BSD, filled_B + h_BTD.shape[1])

    def begin(self, state: State, length: int) -> ChunkReader:
        return _AttentionReader(self, state, length)

    def not_forgotten(self, past_BMD: Tensor, block: int) -> Tensor:
        """The rows of the memory that a block of this many tokens sees."""
        return past_BMD[:, max(0, past_BMD.shape[1] - max(0, self.memory_length - block)) :]

    def remembered(self, g_BSD: Tensor, filled_B: Tensor) -> State:
        if g_BSD.shape[1] > self.memory_length:
            g_BSD = g_BSD[:, g_BSD.shape[1] - self.memory_length :].clone()  # else the state keeps all of it
        return State({"memory": g_BSD, "filled": filled_B.clamp(max=self.memory_length)})

    def collapse(self) -> None:
        """Replace the gate by the vector that it computes from its weights: the same output, no training."""
        self.value_gate = FixedGate(self.value_gate().detach())

    def attend(
        self, x_BTD: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], filled_B: Tensor
    ) -> Tensor:
        """Attention to g, given in one part or in several."""
        q_BTD = self.drop(torch.sigmoid(self.query_scale_D) * self.query_norm(self.query(x_BTD)))
        attend = _attend_by_products if x_BTD.is_cuda else _attend_by_torch
        q_BTD = torch.sigmoid(self.key_scale_D) * q_BTD
        visible_BTS = _visible(x_BTD.shape[1], sum(k.shape[1] for k in keys), filled_B)
        keep(self, q_BTD, keys, visible_BTS)
        attended_BTD = attend(q_BTD, keys, values, visible_BTS, self.dropout if self.training else 0.0)
        return self.value_gate() * attended_BTD

    def drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)

    def flops(self, shape: Shape) -> float:
        """The query, scores and weighted sum over all keys, and the gate once for all tokens."""
        keys, width = max(self.memory_length, shape.block_length), self.query.in_features
        gate = flops(self.value_gate, shape) / (shape.batch_size * shape.block_length)
        return flops(self.query, shape) + 2 * 2 * keys * width + gate


class _AttentionReader(ChunkReader):
    """The length of the text decides how much memory is used; the memory's dropout is drawn once per text."""

    def __init__(self, attention: SingleHeadAttention, state: State, length: int) -> None:
        self.attention = attention
        past_BMD = attention.not_forgotten(state.tensor("memory"), length)
        self.g = [past_BMD] if past_BMD.shape[1] else []
        recalled = [attention._recalled(attention, past, _precision(past)) for past in self.g]
        self.keys, self.values = [k for k, _ in recalled], [v for _, v in recalled]
        self.filled_B = state.tensor("filled")

    def read(self, h_BTD: Tensor) -> Tensor:
        out_BTD, g_BTD, v_BTD = self.attention._chunk(
            self.attention, h_BTD, self.keys, self.values, self.filled_B
        )
        self.g, self.keys, self.values = [*self.g, g_BTD], [*self.keys, g_BTD], [*self.values, v_BTD]
        self.filled_B = self.filled_B + h_BTD.shape[1]
        return out_BTD

    def end(self) -> State:
        return self.attention.remembered(torch.cat(self.g, dim=1), self.filled_B)


def _precision(x: Tensor) -> torch.dtype:
    """The precision of products."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _recalled(attention: SingleHeadAttention, past_BMD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The memory as keys and as values."""
    return past_BMD.to(dtype), attention.drop(past_BMD).to(dtype)


def _chunk(
    attention: SingleHeadAttention,
    h_BTD: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    filled_B: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output for a chunk, and its keys and values, which later chunks attend to."""
    x_BTD, g_BTD = attention.norm(h_BTD), attention.memory_norm(h_BTD)
    v_BTD = attention.drop(g_BTD)
    attended_BTD = attention.attend(x_BTD, [*keys, g_BTD], [*values, v_BTD], filled_B)
    return x_BTD + attention.drop(attended_BTD), g_BTD, v_BTD


class ValueGate(nn.Module):
    """gate = σ(f) tanh(c) with [c; f] = W σ(s) + b: a learned vector, overparameterised."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_D = nn.Parameter(torch.zeros(width))
        self.mix = nn.Linear(width, 2 * width)

    def forward(self) -> Tensor:
        content_D, forget_D = self.mix(torch.sigmoid(self.scale_D)).chunk(2)
        return torch.sigmoid(forget_D) * torch.tanh(content_D)


class FixedGate(nn.Module):
    """The constant output of a gate that is no longer trained."""

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
    """The same written out: torch's GPU kernels do not support heads of this width, and its fallback
    multiplies in full precision.

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
    # The sum of all weights is 1 except for rounding. It is needed for its gradient: the subtracted term of
    # the softmax gradient is then known for each row before the gradients of its weights are.
    return reduce(torch.add, attended) / reduce(torch.add, sums)


def _seen(scores_BTS: Tensor, visible_BTS: Tensor) -> Tensor:
    full = torch.promote_types(scores_BTS.dtype, torch.float32)
    return scores_BTS.to(full).masked_fill(~visible_BTS, -math.inf)


def _weights(scores_BTS: Tensor, visible_BTS: Tensor, total_BT1: Tensor) -> tuple[Tensor, Tensor]:
    """exp(scores - total), and its sum over the keys."""
    return _Weights.apply(scores_BTS, visible_BTS, total_BT1)  # type: ignore[no-untyped-call]


class _Weights(torch.autograd.Function):
    """Saves only the weights for the backward pass, in the precision of the scores."""

    @staticmethod
    def forward(
        ctx: Any, scores_BTS: Tensor, visible_BTS: Tensor, total_BT1: Tensor
    ) -> tuple[Tensor, Tensor]:
        weights_BTS = torch.exp(_seen(scores_BTS, visible_BTS) - total_BT1)
        # Checked first: torch 2.11 compiles a conversion that changes nothing without its gradient.
        if weights_BTS.dtype != scores_BTS.dtype:
            weights_BTS = weights_BTS.to(scores_BTS.dtype)
        ctx.save_for_backward(weights_BTS)
        return weights_BTS, weights_BTS.sum(-1, keepdim=True, dtype=total_BT1.dtype)

    @staticmethod
    def backward(ctx: Any, dweights_BTS: Tensor, dsum_BT1: Tensor) -> tuple[Tensor, None, None]:
        (weights_BTS,) = ctx.saved_tensors
        return (weights_BTS * (dweights_BTS + dsum_BT1)).to(weights_BTS.dtype), None, None


def _visible(block: int, keys: int, filled_B: Tensor) -> Tensor:
    """[B, T, S]: a position sees itself and what is before it, as far back as its text goes."""
    s_S = torch.arange(block - keys, block, device=filled_B.device)  # the block begins at 0
    t_T1 = torch.arange(block, device=filled_B.device)[:, None]
    return (s_S <= t_T1) & (s_S >= -filled_B[:, None])[:, None]
