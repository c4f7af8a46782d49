"""The heads of an attention block: their parameters, groups and projections.

Shapes: B batch, T block, H heads, D width, K head width, R rows of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from longspan.kernels.linear import linear
from longspan.kernels.qk_norm_rope import PURE, QKV, Mix, qk_norm_rope, rotated_pairs
from longspan.kernels.span_attention import cuts_windows, head_groups
from longspan.layers.block import Block
from longspan.layers.dropout import GrowingDropout, dropout
from longspan.layers.head_groups import HeadGroups
from longspan.layers.head_mixing import GATE_INPUTS, HeadGates, gates, last_still
from longspan.layers.linear import Linear
from longspan.layers.persistent_memory import PersistentMemory
from longspan.layers.positions import Positions
from longspan.layers.post_norm import normed_sum
from longspan.layers.projections import OrderedWeights, ordered_weights, product_dtype
from longspan.layers.qk_norm import QueryKeyNorm
from longspan.layers.residual_stream import Blend
from longspan.layers.select_heads import indices_of, inverse, select_heads
from longspan.layers.span import Span
from longspan.state import State


class AttentionHeads(Block):
    """All of `Attention` that does not depend on the form of its memory."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        span: Span,
        positions: Positions,
        persistent: PersistentMemory | None = None,
        head_width: int | None = None,
        dropout: float,
        output_dropout: float | GrowingDropout = 0.0,
        norm_first: bool,
        norm_recalled: bool = False,
        sees_itself: bool = False,
        empty_start: bool = False,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        qk_norm: bool = False,
        memory: Literal["hidden", "keys-values"] = "hidden",
        output_bias: bool = False,
        value_gates: bool = False,
        key_offset: bool = False,
        initial_gain: float = 1.0,
    ) -> None:
        super().__init__()
        if empty_start and not sees_itself:
            raise ValueError("the first position of a text that begins with nothing must see itself")
        if memory == "keys-values" and not empty_start:
            raise ValueError("zeros are no keys and values: a text must begin with nothing")
        if memory != "keys-values" and (value_gates or key_offset):
            raise ValueError("a memory of hidden states does not know the tokens: keep keys and values")
        self.num_heads = num_heads
        self.head_width = head_width or width // num_heads
        inner_width = num_heads * self.head_width
        self.query = Linear(width, inner_width, bias=False)
        self.key = Linear(width, inner_width, bias=False)
        self.value = Linear(width, inner_width, bias=False)
        self.out = Linear(inner_width, width, bias=output_bias)
        self.norm = norm(width)
        self.qk_norm = QueryKeyNorm(num_heads, initial_gain) if qk_norm else None
        self.span = span
        if not positions.shared:
            self.positions = positions
        self._positions = (positions,)  # in a tuple, so that positions of the model are not registered again
        self.persistent = persistent
        self.dropout = dropout
        self.output_dropout = output_dropout
        self.norm_first = norm_first
        self.norm_recalled = norm_first and norm_recalled
        self.sees_itself = sees_itself
        self.empty_start = empty_start
        self.keeps_keys = memory == "keys-values"
        self.value_gates = HeadGates(width, num_heads) if value_gates else None
        pairs, rope = self.head_width // 2, positions.rope
        self.still = pairs - rotated_pairs(pairs, rope.fraction) if key_offset and rope is not None else 0
        self._gates = gates

    def _head_groups(self, block: int, x: Tensor) -> HeadGroups:
        """The window of each head on the device of `x`, and which heads are computed together."""
        if self._backend_cuts_windows(x):
            depth = self.span.memory_length
            alone = [[head] for head in range(self.num_heads)]
            return HeadGroups(tuple(min(cap, depth) for cap in self.span.caps), alone)
        windows_H = self._windows(block)
        return HeadGroups(windows_H, head_groups(windows_H, kinds_H=self._group_kinds()))

    def _windows(self, block: int) -> tuple[int, ...]:
        """The window of each head, at most as long as its KV cache."""
        windows_H = self.span.windows_for(block)
        return tuple(map(min, windows_H, self.span.caps)) if self.keeps_keys else windows_H

    def _group_kinds(self) -> tuple[int, ...] | None:
        """Heads of a group must have the same cap if no span hides distant keys, or if keys are cached."""
        return self.span.caps if self.keeps_keys or not self.span.is_soft else None

    def _backend_cuts_windows(self, x: Tensor) -> bool:
        """Whether only kernels compute per distance: they cut windows to spans themselves."""
        nothing_per_distance = self.keeps_keys and not self._positions[0].has_keys
        return nothing_per_distance and self.span.windows_follow_spans and cuts_windows(x, self.head_width)

    def _ordered_weights(self, heads: HeadGroups, recalls: bool) -> OrderedWeights:
        qkv = [self.query.weight, self.key.weight, self.value.weight]
        return ordered_weights(qkv, self.out.weight, heads, self.head_width, recalls=recalls)

    def _project(self, x_BTD: Tensor, order: list[int], weights: OrderedWeights | None) -> Tensor:
        """Queries, then keys, then values of the heads in this order, [B, T, 3H, K]."""
        per_head = (3 * self.num_heads, self.head_width)
        if weights is not None:
            return torch.unflatten(linear(x_BTD, weights.qkv), -1, per_head)
        qkv = torch.cat([layer(x_BTD) for layer in (self.query, self.key, self.value)], dim=-1)
        rows_BTRK = torch.unflatten(qkv, -1, per_head)
        return select_heads(rows_BTRK, indices_of((0, 1, 2), order, self.num_heads), dim=2)

    def _project_out(self, attended_BTHK: Tensor, order: list[int], weights: OrderedWeights | None) -> Tensor:
        """Wo times the output of heads in this order, plus the bias."""
        if weights is not None:
            return linear(attended_BTHK.flatten(2), weights.out, self.out.bias)
        return self.out(select_heads(attended_BTHK, inverse(order), dim=2).flatten(2))

    def _rows(self, matrix: Tensor, heads: list[int]) -> Tensor:
        """The rows of a matrix that belong to these heads, in their order."""
        by_head = torch.unflatten(matrix, 0, (self.num_heads, self.head_width))
        return select_heads(by_head, heads).flatten(0, 1)

    def _mix(
        self,
        rows_BTRK: Tensor,
        value_BTD: Tensor | None,
        gate_BTH: Tensor | None,
        state: State,
        heads: list[int],
    ) -> tuple[Mix, dict[str, Tensor]]:
        """What is mixed into projected rows of these heads, and its state after them."""
        value_BTHK = before_B1H2S = None
        after: dict[str, Tensor] = {}
        if gate_BTH is not None and value_BTD is not None:
            value_BTHK = torch.unflatten(value_BTD, -1, (self.num_heads, self.head_width))
            value_BTHK = select_heads(value_BTHK, heads, dim=2)
        if self.still:
            before_B1H2S = select_heads(state.tensor("offset"), heads, dim=2)
            last_B1H2S = last_still(rows_BTRK, self.num_heads, self.still)
            after["offset"] = select_heads(last_B1H2S, inverse(heads), dim=2)
        return Mix(value_BTHK, gate_BTH, before_B1H2S), after

    def _qk_norm_rope(
        self, rows_BTRK: Tensor, state: State, heads: list[int], mix: Mix = PURE, first: int = 0
    ) -> QKV:
        """Projected rows of these heads with QK-norm and RoPE; `first` counts from the block's beginning."""
        gain_H = None if self.qk_norm is None else select_heads(self.qk_norm.gain_H, heads)
        rope = self._positions[0].rope
        if rope is None:
            return qk_norm_rope(rows_BTRK, len(heads), gain_H=gain_H, mix=mix)
        first_B = state.tensor("read") + first if first else state.tensor("read")
        return qk_norm_rope(rows_BTRK, len(heads), gain_H=gain_H, first_B=first_B, rope=rope, mix=mix)

    def _normed(self, h_BTD: Tensor, blend: Blend | None) -> tuple[Tensor, Tensor, Tensor]:
        """h, blended; x, in the precision in which it is multiplied and remembered; its channels for gates.

        All from one compiled function: their gradients are then added in the same pass.
        """
        h_BTD = h_BTD if blend is None else blend.of(h_BTD)
        x_BTD: Tensor = self.norm(h_BTD) if self.norm_first else h_BTD
        x_BTD = x_BTD.to(product_dtype(x_BTD))
        return h_BTD, x_BTD, x_BTD[..., :GATE_INPUTS]

    def _add_residual(self, h_BTD: Tensor, out_BTD: Tensor) -> Tensor:
        if self.norm_first:
            return h_BTD + dropout(out_BTD, self.output_dropout, self.training)
        return normed_sum(self.norm, h_BTD, out_BTD, self.output_dropout, training=self.training)
