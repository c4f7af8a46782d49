"""The attention block: heads with their own spans over a memory.

Shapes: B batch, T block, M memory, H heads, D width, K head width, G heads of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from longspan.kernels.linear import SMALL_BATCH, FixedProduct, linear
from longspan.kernels.qk_norm_rope import Placed, place
from longspan.kernels.span_attention import cuts_windows, head_groups, one_token, soft_mask, span_attention
from longspan.layers import kv_cache
from longspan.layers.block import Block, Step
from longspan.layers.dropout import GrowingDropout, dropout
from longspan.layers.linear import Linear
from longspan.layers.persistent_memory import PersistentMemory
from longspan.layers.positions import LearnedDistanceKeys, Positions
from longspan.layers.post_norm import kernels_for, normed_sum
from longspan.layers.projections import end_to_end, product_dtype, rows_of_heads
from longspan.layers.qk_norm import QueryKeyNorm
from longspan.layers.select_heads import select_heads
from longspan.layers.span import Span
from longspan.layers.span_step import HeadsOfOneWindow, SpanStep, step_groups
from longspan.state import State


class _Weights(NamedTuple):
    """Matrices with their heads in order; of keys and values also those of every group that recalls."""

    qkv: Tensor
    out: Tensor
    recalled: list[Tensor]


class Attention(Block):
    """u = LN(h + Wo attention(Wq x, Wk [memory; x], Wv [memory; x])) with x = h; no biases.

    With `norm_first` u = h + Wo attention(...) with x = LN(h). The memory holds the last x, oldest first.
    With `norm_recalled` it holds the last h, and they are normed when they are recalled.
    A text begins with a memory of zeros that take part in the softmax, or, with `empty_start`, with nothing:
    the state then counts the rows that are filled. A position sees itself only with `sees_itself`.
    Beside the text every head may see persistent `persistent`.

    The memory is projected anew with the current weights in every block, for every group of heads as far back
    as it sees. For decoding with fixed weights `decoding_state` replaces it by these keys and values.

    A memory of "keys-values" holds keys and values of every head, as far as it will ever look (`head_memory`)
    and as they were when they were read: nothing is projected twice, and in training those of older blocks
    come from older weights, which learn from them only within their own block.

    `norm` makes the norm that LN stands for; with `qk_norm` queries and keys are normed in every head.
    """

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
    ) -> None:
        super().__init__()
        if empty_start and not sees_itself:
            raise ValueError("the first position of a text that begins with nothing must see itself")
        if memory == "keys-values" and not empty_start:
            raise ValueError("zeros are no keys and values: a text must begin with nothing")
        self.num_heads = num_heads
        self.head_width = head_width or width // num_heads
        inner_width = num_heads * self.head_width
        self.query = Linear(width, inner_width, bias=False)
        self.key = Linear(width, inner_width, bias=False)
        self.value = Linear(width, inner_width, bias=False)
        self.out = Linear(inner_width, width, bias=False)
        self.norm = norm(width)
        self.qk_norm = QueryKeyNorm(num_heads) if qk_norm else None
        self.span = span
        if not positions.shared:
            self.positions = positions
        self._positions = (positions,)  # in a tuple those that the model owns are not registered again
        self.persistent = persistent
        self.dropout = dropout
        self.output_dropout = output_dropout
        self.norm_first = norm_first
        self.norm_recalled = norm_first and norm_recalled
        self.sees_itself = sees_itself
        self.empty_start = empty_start
        self.keeps_keys = memory == "keys-values"

    def initial_state(self, batch_size: int) -> State:
        weight, length = self.query.weight, self.span.memory_length
        if self.keeps_keys:
            rows = kv_cache.empty(weight, batch_size, self.span.caps, length, self.head_width)
        else:
            rows = weight.new_zeros(length, batch_size, weight.shape[1]).transpose(0, 1)
        counters = ["filled"] * self.empty_start + ["read"] * self._positions[0].counts
        none_B = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        return State({"memory": rows} | {name: none_B.clone() for name in counters})

    def compile_parts(self) -> None:
        """What comes before the projection and after the sum over heads, unless kernels do it.

        Between them windows move.
        """
        self._normed = torch.compile(self._normed)  # type: ignore[method-assign]
        if self.norm_first or not kernels_for(self.norm, self.query.weight, self.output_dropout):
            self._joined = torch.compile(self._joined)  # type: ignore[method-assign]

    @torch.compiler.disable(reason="windows move while spans are learned: it would compile again and again")
    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        x_BTD = self._normed(h_BTD)
        # Heads that are computed together lie together, by the order of the matrices' rows and columns.
        windows, groups = self._windows_and_groups(h_BTD.shape[1], h_BTD)
        order = [head for heads in groups for head in heads]
        few = (
            h_BTD.shape[0] * h_BTD.shape[1] <= SMALL_BATCH
        )  # then queries, keys and values are ordered, not weights
        weights = None if few else self._weights(groups, recalls="memory" in state and not self.keeps_keys)
        *qkv, new_BTXK = self._placed(self._projected(x_BTD, order, weights), state, order)
        q_BHTK, k_BHTK, v_BHTK = (x_BTHK.transpose(1, 2) for x_BTHK in qkv)
        reaches = [max(windows[head] for head in heads) for heads in groups]
        past = [kv_BMXK.to(k_BHTK.dtype) for kv_BMXK in self._recall(state, groups, reaches, weights)]
        terms = self._positions[0].terms(h_BTD.shape[0] * h_BTD.shape[1], max(windows), order)
        spans_H = self.span.spans_H()
        attended_BHTK = span_attention(
            q_BHTK,
            k_BHTK,
            v_BHTK,
            past=past,
            windows=[windows[head] for head in order],
            position_keys=terms.distance_keys,
            content_bias_HK=terms.content_bias_HK,
            position_bias_HK=terms.distance_bias_HK,
            position_map_HKE=terms.distance_map_HKD,
            filled_B=self._filled(state) if self.sees_itself else None,
            first_distance=0 if self.sees_itself else 1,
            persistent=None if self.persistent is None else self.persistent.of(order),
            spans_H=None if spans_H is None else select_heads(spans_H, order),
            ramp=self.span.ramp,
            renormalise=self.span.renormalise,
            dropout=self.dropout if self.training else 0.0,
            windows_follow_spans=self.span.windows_follow_spans,
        )
        out_BTD = self._merged(attended_BHTK.transpose(1, 2), order, weights)
        if "past" in state:
            new = _of_groups(new_BTXK, [len(heads) for heads in groups])
            remembered: dict[str, State | Tensor] = {"past": _numbered(map(self._append, past, new, reaches))}
        elif self.keeps_keys:
            in_place = select_heads(new_BTXK, _of_kinds((0, 1), _places(order), self.num_heads), dim=2)
            caps, depth = self.span.caps, self.span.memory_length
            remembered = {"memory": kv_cache.appended(state.tensor("memory"), in_place, caps, depth)}
        else:
            # Of what is only projected again, no more needs to be kept than the projection reads.
            new_BTD = h_BTD if self.norm_recalled else x_BTD.to(k_BHTK.dtype)
            remembered = {"memory": self._append(state.tensor("memory"), new_BTD)}
        after = State(remembered | self._count(state, new_tokens=h_BTD.shape[1]))
        return self._joined(h_BTD, out_BTD), after

    def shape_key(self) -> Hashable:
        windows, groups = self._windows_and_groups(1, self.query.weight)
        return windows, len(groups), self.span.memory_length

    def _windows_and_groups(self, block: int, x: Tensor) -> tuple[tuple[int, ...], list[list[int]]]:
        """How far each head is computed on the device of `x`, and which heads are computed together."""
        if self._windows_are_cut_later(x):
            depth = self.span.memory_length
            alone = [[head] for head in range(self.num_heads)]
            return tuple(min(cap, depth) for cap in self.span.caps), alone
        windows, caps = self._own_windows(block), self.span.caps
        # Where no span hides what is too far, or it was not remembered, heads must look equally far.
        exact = self.keeps_keys or not self.span.is_soft
        return windows, head_groups(windows, kinds_H=caps if exact else None)

    def _own_windows(self, block: int) -> tuple[int, ...]:
        """How far each head must be computed: no further than its keys are kept."""
        windows = self.span.windows_for(block)
        return tuple(map(min, windows, self.span.caps)) if self.keeps_keys else windows

    def _windows_are_cut_later(self, x: Tensor) -> bool:
        """Whether nothing is made for a distance but by kernels that see for themselves how far spans go."""
        nothing_per_distance = self.keeps_keys and not self._positions[0].has_keys
        return nothing_per_distance and self.span.windows_follow_spans and cuts_windows(x, self.head_width)

    def _normed(self, h_BTD: Tensor) -> Tensor:
        """x, as it is multiplied and remembered."""
        x_BTD: Tensor = self.norm(h_BTD) if self.norm_first else h_BTD
        return x_BTD.to(product_dtype(x_BTD))

    def _weights(self, groups: list[list[int]], recalls: bool) -> _Weights:
        order = [head for heads in groups for head in heads]
        matrices = [self.query.weight, self.key.weight, self.value.weight]
        pieces = [_of_kinds((0, 1, 2), order, self.num_heads)]
        pieces += [_of_kinds((1, 2), heads, self.num_heads) for heads in groups if recalls]
        if order == sorted(order):
            qkv, *recalled = rows_of_heads(matrices, pieces, self.head_width)
            return _Weights(qkv, self.out.weight, recalled)
        matrices.append(self.out.weight.mT)
        pieces.append(_of_kinds((3,), order, self.num_heads))
        qkv, *recalled, out = rows_of_heads(matrices, pieces, self.head_width)
        return _Weights(qkv, out.mT, recalled)

    def _projected(self, x_BTD: Tensor, order: list[int], weights: _Weights | None) -> Tensor:
        """Queries, then keys, then values of the heads in this order, [B, T, 3H, K]."""
        layers, per_head = (self.query, self.key, self.value), (3 * self.num_heads, self.head_width)
        if weights is None:
            rows_BTRK = torch.unflatten(torch.cat([layer(x_BTD) for layer in layers], dim=-1), -1, per_head)
            return select_heads(rows_BTRK, _of_kinds((0, 1, 2), order, self.num_heads), dim=2)
        return torch.unflatten(linear(x_BTD, weights.qkv), -1, per_head)

    def _merged(self, attended_BTHK: Tensor, order: list[int], weights: _Weights | None) -> Tensor:
        """Wo times what heads in this order have found."""
        if weights is None:
            return self.out(select_heads(attended_BTHK, _places(order), dim=2).flatten(2))
        return linear(attended_BTHK.flatten(2), weights.out)

    def _joined(self, h_BTD: Tensor, out_BTD: Tensor) -> Tensor:
        """The residual stream with what attention adds to it."""
        if self.norm_first:
            return h_BTD + dropout(out_BTD, self.output_dropout, self.training)
        return normed_sum(self.norm, h_BTD, out_BTD, self.output_dropout, training=self.training)

    def decoding_state(self, state: State) -> State:
        if self.norm_recalled and not self.empty_start:
            return state  # a text begins with the norm's biases, and not with keys and values of zeros
        some = next(iter(state.flatten().values()))
        if self._windows_are_cut_later(some):
            return state  # which has every head's keys and values already
        windows, groups = self._windows_and_groups(1, some)
        past = self._recall(state, groups, [max(windows[head] for head in heads) for heads in groups])
        return State({"past": _numbered(past)} | self._count(state, new_tokens=0))

    def step_from(self, state: State) -> Step | None:
        if cuts_windows(self.query.weight, self.head_width):
            return self._recordable_step(state)
        positions, spans_H = self._positions[0], self.span.spans_H()
        plain = not self.sees_itself and self.persistent is None and self.qk_norm is None
        weight = self.query.weight
        exact = weight.dtype in (torch.float32, torch.float64) and weight.device.type == "cpu"
        if spans_H is None or not (self.span.renormalise and plain and exact and "memory" in state):
            return super().step_from(state)
        if not isinstance(positions, LearnedDistanceKeys):
            return super().step_from(state)
        windows = self.span.windows_for(1)
        groups = step_groups(windows)
        order = [head for heads in groups for head in heads]
        reaches = [max(windows[head] for head in heads) for heads in groups]
        masks = [soft_mask(spans_H[heads], self.span.ramp, max(reaches)) for heads in groups]
        past = self._recall(state, groups, reaches)
        remembering = [
            HeadsOfOneWindow(kv_BMXK, mask_GL[:, :reach], positions.keys_LK[:reach])
            for kv_BMXK, mask_GL, reach in zip(past, masks, reaches, strict=True)
        ]
        qkv = torch.cat([self._rows(layer.weight, order) for layer in (self.query, self.key, self.value)])
        out = self._rows(self.out.weight.mT, order).mT.contiguous()
        return SpanStep(remembering, qkv, out, norm=self.norm, norm_first=self.norm_first)

    def _recordable_step(self, state: State) -> Step | None:
        if "memory" not in state or (self.norm_recalled and not self.empty_start):
            return None  # a memory like that is no keys and values: see `decoding_state`
        windows, order = self._own_windows(1), list(range(self.num_heads))
        terms, spans_H = self._positions[0].terms(1, max(windows), order), self.span.spans_H()
        keys, to_keys_HKD = terms.distance_keys, terms.distance_map_HKD
        project = FixedProduct(torch.cat([self.query.weight, self.key.weight, self.value.weight]))
        out = FixedProduct(self.out.weight)
        past = self._recall(state, [[head] for head in order], list(windows))
        remembered = one_token(
            past=[kv_BM2K.to(self.query.weight.dtype) for kv_BM2K in past],
            windows=windows,
            position_keys=keys if keys is None or to_keys_HKD is None else keys @ to_keys_HKD.mT,
            content_bias_HK=terms.content_bias_HK,
            position_bias_HK=terms.distance_bias_HK,
            filled_B=self._filled(state) if self.sees_itself else None,
            first_distance=0 if self.sees_itself else 1,
            persistent=None if self.persistent is None else self.persistent.of(order),
            spans_H=spans_H,
            ramp=self.span.ramp,
            renormalise=self.span.renormalise,
        )
        read = State({"read": state.tensor("read").clone()} if self._positions[0].counts else {})

        def step(h_1BD: Tensor) -> Tensor:
            rows_1BRK = torch.unflatten(project(self._normed(h_1BD)), -1, (-1, self.head_width))
            placed = self._placed(rows_1BRK.transpose(0, 1).contiguous(), read, order)
            found_BHK = remembered.attend(*(x_BTHK.squeeze(1) for x_BTHK in placed[:3]))
            for count_B in read.flatten().values():
                count_B += 1
            h_1BD = out(found_BHK.flatten(1)[None], onto=h_1BD)
            return h_1BD if self.norm_first else self.norm(h_1BD)

        return step

    def _recall(
        self, state: State, groups: list[list[int]], reaches: list[int], weights: _Weights | None = None
    ) -> list[Tensor]:
        """For every group of heads the keys and values of what it can see of the memory, [B, M, 2G, K]."""
        if "past" in state:
            return [state.branch("past").tensor(str(number)) for number in range(len(groups))]
        memory = state.tensor("memory")
        if self.keeps_keys:
            rows = kv_cache.by_head(memory, self.span.caps)
            each = zip(groups, reaches, strict=True)
            return [kv_cache.of_group([rows[head] for head in heads], reach) for heads, reach in each]
        nears = [_last(memory, reach) for reach in reaches]
        if weights is None:
            both = (self.key.weight, self.value.weight)
            recalled = [torch.cat([self._rows(weight, heads) for weight in both]) for heads in groups]
        else:
            recalled = weights.recalled
            as_they_are = not (self.norm_recalled or self.qk_norm or self._positions[0].counts)
            if len(groups) > 1 and as_they_are and cuts_windows(memory, self.head_width):
                past = end_to_end(memory.transpose(0, 1), reaches, recalled)
                return [torch.unflatten(kv_MBX, -1, (-1, self.head_width)).transpose(0, 1) for kv_MBX in past]
        return [
            self._project(near, weight, state, heads)
            for near, weight, heads in zip(nears, recalled, groups, strict=True)
        ]

    def _project(self, near_BMD: Tensor, weight: Tensor, state: State, heads: list[int]) -> Tensor:
        """Keys and values of remembered hidden states, [B, M, 2G, K]."""
        if not torch.is_autocast_enabled(near_BMD.device.type):
            near_BMD = near_BMD.to(weight.dtype)  # they may have been remembered under autocast
        if self.norm_recalled:
            near_BMD = self.norm(near_BMD)
        kv_MBX = linear(near_BMD.transpose(0, 1), weight)
        kv_BMXK = torch.unflatten(kv_MBX, -1, (-1, self.head_width)).transpose(0, 1)
        return self._placed(kv_BMXK, state, heads, first=-near_BMD.shape[1]).kv_BTXK

    def _placed(self, rows_BTRK: Tensor, state: State, heads: list[int], first: int = 0) -> Placed:
        """What was projected for these heads, normed and at its positions.

        The first position is counted from the beginning of the block.
        """
        gain_H = None if self.qk_norm is None else select_heads(self.qk_norm.gain_H, heads)
        base = self._positions[0].base
        if base is None:
            return place(rows_BTRK, len(heads), gain_H=gain_H)
        first_B = state.tensor("read") + first if first else state.tensor("read")
        return place(rows_BTRK, len(heads), gain_H=gain_H, first_B=first_B, base=base)

    def _append(self, old: Tensor, new: Tensor, reach: int | None = None) -> Tensor:
        """What is remembered, with the new rows: as many as the memory holds, or as a group of heads sees."""
        length = self.span.memory_length if reach is None else min(self.span.memory_length, reach)
        kept, new = _last(old, max(0, length - new.shape[1])), _last(new, length)
        # It lies in memory position by position: the last rows of all texts are then one piece. New rows lie
        # otherwise, and `cat` would be slow with them.
        rows = new.new_empty(kept.shape[1] + new.shape[1], new.shape[0], *new.shape[2:]).transpose(0, 1)
        # `narrow` and not an index: that of all rows is no view, and autograd refuses to write into it.
        rows.narrow(1, 0, kept.shape[1]).copy_(kept)
        rows.narrow(1, kept.shape[1], new.shape[1]).copy_(new)
        return rows

    def _filled(self, state: State) -> Tensor:
        """How many rows of the memory are there."""
        if self.empty_start:
            return state.tensor("filled")
        leaves = [leaf for leaf in state.flatten().values() if leaf.dim() > 1]
        rows = max(leaf.shape[1] for leaf in leaves)
        return torch.full(leaves[0].shape[:1], rows, device=leaves[0].device)

    def _count(self, state: State, *, new_tokens: int) -> dict[str, State | Tensor]:
        counted: dict[str, State | Tensor] = {}
        if self.empty_start:
            counted["filled"] = (state.tensor("filled") + new_tokens).clamp(max=self.span.memory_length)
        if self._positions[0].counts:
            counted["read"] = state.tensor("read") + new_tokens
        return counted

    def _rows(self, weight: Tensor, heads: list[int]) -> Tensor:
        """The rows of a matrix that belong to these heads, in their order."""
        by_head = torch.unflatten(weight, 0, (self.num_heads, self.head_width))
        return select_heads(by_head, heads).flatten(0, 1)


def _last(x_BMX: Tensor, rows: int) -> Tensor:
    """The last so many rows, or all if there are fewer; none at all for 0."""
    return x_BMX[:, max(0, x_BMX.shape[1] - rows) :]


def _places(order: list[int]) -> list[int]:
    """Where every head stands in this order."""
    return sorted(range(len(order)), key=order.__getitem__)


def _of_kinds(kinds: Iterable[int], heads: Sequence[int], num_heads: int) -> list[int]:
    """Where some heads stand in a row of all heads' queries and then all keys, or of other kinds."""
    return [kind * num_heads + head for kind in kinds for head in heads]


def _of_groups(kv_BTXK: Tensor, sizes: list[int]) -> list[Tensor]:
    """Keys and values of every group of heads, [B, T, 2G, K]."""
    ends = list(accumulate(sizes))
    groups = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return [select_heads(kv_BTXK, _of_kinds((0, 1), heads, ends[-1]), dim=2) for heads in groups]


def _numbered(tensors: Iterable[Tensor]) -> State:
    return State({str(number): tensor for number, tensor in enumerate(tensors)})
