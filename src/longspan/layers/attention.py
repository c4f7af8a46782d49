"""The attention block: heads with their own spans over a memory.

Shapes: B batch, T block, M memory, H heads, D width, K head width, G heads of one group, R rows of heads,
X = 2H or 2G (keys of heads, then their values).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from longspan.compile_fallback import not_compiled
from longspan.flops import Shape, flops
from longspan.kernels.linear import SMALL_BATCH
from longspan.kernels.span_attention import (
    AttentionContext,
    cuts_windows,
    span_attention,
)
from longspan.layers import hidden_memory, kv_cache, projected_memory
from longspan.layers.attention_heads import AttentionHeads
from longspan.layers.attention_step import AttentionStep
from longspan.layers.block import Step
from longspan.layers.head_groups import HeadGroups
from longspan.layers.post_norm import kernels_for
from longspan.layers.projections import OrderedWeights
from longspan.layers.recording import keep
from longspan.layers.residual_stream import Blend
from longspan.layers.select_heads import indices_of, inverse, select_heads
from longspan.state import State


class Attention(AttentionHeads):
    """u = LN(h + Wo attention(Wq x, Wk [memory; x], Wv [memory; x])) with x = h.

    With `norm_first` u = h + Wo attention(...) with x = LN(h). With `qk_norm` queries and keys have a norm
    in every head. `norm` creates the norm LN. A position sees itself only with `sees_itself`.
    Every head may also see the vectors of `persistent`. Projections have no biases, but `output_bias` adds
    one to Wo.

    The state has one of three forms of memory:

    | form | kept | file |
    |---|---|---|
    | "hidden" | the last x (with `norm_recalled` h), projected again in every block | hidden_memory |
    | "hidden", for decoding | its keys and values, while the weights are fixed | projected_memory |
    | "keys-values" | keys and values of the tokens when they were read | kv_cache |

    With "keys-values" gradients reach the keys and values of one update only.
    A text begins with a memory of zeros that take part in the softmax, or, with `empty_start`, with nothing:
    the state then counts the rows that are filled.
    """

    def initial_state(self, batch_size: int) -> State:
        weight, length = self.query.weight, self.span.memory_length
        if self.keeps_keys:
            rows = kv_cache.empty(weight, batch_size, self.span.caps, length, self.head_width)
        else:
            rows = hidden_memory.empty(weight, batch_size, length)
        counters = ["filled"] * self.empty_start + ["read"] * self._positions[0].counts
        none_B = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        kept = {"memory": rows} | {name: none_B.clone() for name in counters}
        if self.still:
            kept["offset"] = weight.new_zeros(batch_size, 1, self.num_heads, 2, self.still)
        return State(kept)

    def compile_parts(self) -> None:
        """Compile what comes before the projection and after the sum over heads, unless kernels do it.

        The shapes of the operations between them change with the windows.
        """
        self._normed = torch.compile(self._normed)  # type: ignore[method-assign]
        if self.norm_first or not kernels_for(self.norm, self.query.weight, self.output_dropout):
            self._add_residual = torch.compile(self._add_residual)  # type: ignore[method-assign]
        self._gates = torch.compile(self._gates)

    @not_compiled(reason="windows change while spans are learned: every change would compile again")
    def forward(
        self, h_BTD: Tensor, state: State, value_BTD: Tensor | None = None, blend: Blend | None = None
    ) -> tuple[Tensor, State]:
        """`value_BTD` are embeddings of the tokens, added to the values with a gate of every head.

        With `blend` the block reads this in place of h.
        """
        h_BTD, x_BTD, x_BTC = self._normed(h_BTD, blend)
        block, num_queries = h_BTD.shape[1], h_BTD.shape[0] * h_BTD.shape[1]
        heads = self._head_groups(block, h_BTD)
        weights = None  # for a small batch it is faster to order activations than weights
        if num_queries > SMALL_BATCH:
            weights = self._ordered_weights(heads, recalls="memory" in state and not self.keeps_keys)
        rows_BTRK = self._project(x_BTD, heads.order, weights)
        gate_BTH = None
        if self.value_gates is not None and value_BTD is not None:
            gate_BTH = self._gates(x_BTC, self.value_gates.of(heads.order))
        mix, mixed = self._mix(rows_BTRK, value_BTD, gate_BTH, state, heads.order)
        *qkv, new_BTXK = self._qk_norm_rope(rows_BTRK, state, heads.order, mix)
        q_BHTK, k_BHTK, v_BHTK = (x_BTHK.transpose(1, 2) for x_BTHK in qkv)
        past = [kv_BMXK.to(k_BHTK.dtype) for kv_BMXK in self._recall(state, heads, weights)]
        context = self._context(heads, past, state, x_BTD)
        keep(self, q_BHTK, k_BHTK, heads.order, context)
        attended_BHTK = span_attention(q_BHTK, k_BHTK, v_BHTK, context)
        out_BTD = self._project_out(attended_BHTK.transpose(1, 2), heads.order, weights)
        depth = self.span.memory_length
        if "past" in state:
            after = State({"past": projected_memory.appended(past, new_BTXK, heads, depth)})
        elif self.keeps_keys:
            own_BTXK = select_heads(new_BTXK, indices_of((0, 1), inverse(heads.order), self.num_heads), dim=2)
            after = State(
                {"memory": kv_cache.appended(state.tensor("memory"), own_BTXK, self.span.caps, depth)}
            )
        else:
            # Hidden states are only projected again, so the precision of the products is enough.
            new_BTD = h_BTD if self.norm_recalled else x_BTD.to(k_BHTK.dtype)
            after = State({"memory": hidden_memory.appended(state.tensor("memory"), new_BTD, depth)})
        counters = self._counters(state, new_tokens=block)
        return self._add_residual(h_BTD, out_BTD), State({**after, **counters, **mixed})

    def shape_key(self) -> Hashable:
        heads = self._head_groups(1, self.query.weight)
        return heads.windows_H, len(heads.groups), self.span.memory_length

    def decoding_state(self, state: State) -> State:
        device = next(iter(state.flatten().values()))
        if not self._can_keep_projections() or self._backend_cuts_windows(device):
            return state  # a KV cache already has every head's keys and values
        past = self._recall(state, self._head_groups(1, device))
        offset = {"offset": state.tensor("offset")} if self.still else {}
        return State({"past": projected_memory.branch(past), **self._counters(state, new_tokens=0), **offset})

    def step_from(self, state: State) -> Step | None:
        weight = self.query.weight
        on_known_device = weight.device.type == "cpu" or cuts_windows(weight, self.head_width)
        if "memory" not in state or not on_known_device or not self._can_keep_projections():
            return super().step_from(state)
        return AttentionStep(self, state)

    def _can_keep_projections(self) -> bool:
        """False if a text begins with zeros and the memory is normed: the norm has biases."""
        return self.empty_start or not self.norm_recalled

    def _context(
        self, heads: HeadGroups, past: Sequence[Tensor], state: State, x_BTD: Tensor
    ) -> AttentionContext:
        order, spans = heads.order, self.span.spans_for(x_BTD)
        num_queries = x_BTD.shape[0] * x_BTD.shape[1]
        terms = self._positions[0].terms(num_queries, max(heads.windows_H), order)
        return AttentionContext(
            past=past,
            windows=heads.ordered_windows,
            **terms._asdict(),
            persistent=None if self.persistent is None else self.persistent.of(order),
            filled_B=self._filled(state) if self.sees_itself else None,
            spans=None if spans is None else select_heads(spans, order, dim=0 if spans.dim() == 1 else 1),
            ramp=self.span.ramp,
            renormalise=self.span.renormalise,
            first_distance=0 if self.sees_itself else 1,
            dropout=self.dropout if self.training else 0.0,
            windows_follow_spans=self.span.windows_follow_spans,
        )

    def _recall(self, state: State, heads: HeadGroups, weights: OrderedWeights | None = None) -> list[Tensor]:
        """For every group of heads the keys and values of the memory that it sees, [B, M, 2G, K]."""
        if "past" in state:
            return projected_memory.by_group(state)
        memory, reaches = state.tensor("memory"), heads.reaches
        if self.keeps_keys:
            return kv_cache.by_group(memory, self.span.caps, heads)
        unchanged = not (self.norm_recalled or self.qk_norm or self._positions[0].counts)
        if weights is not None and unchanged and len(reaches) > 1 and cuts_windows(memory, self.head_width):
            past = hidden_memory.project_end_to_end(memory, reaches, weights.recalled)
            return [torch.unflatten(kv_BMX, -1, (-1, self.head_width)) for kv_BMX in past]
        if weights is None:
            both = (self.key.weight, self.value.weight)
            matrices = [torch.cat([self._rows(matrix, group) for matrix in both]) for group in heads.groups]
        else:
            matrices = weights.recalled
        past = hidden_memory.project(memory, reaches, matrices, self.norm if self.norm_recalled else None)
        return [
            self._qk_norm_rope(
                torch.unflatten(kv_BMX, -1, (-1, self.head_width)), state, group, first=-kv_BMX.shape[1]
            ).kv_BTXK
            for kv_BMX, group in zip(past, heads.groups, strict=True)
        ]

    def flops(self, shape: Shape) -> float:
        """Projections, and for every head what it computes for the keys in its window W and memory M."""
        (B, T, _), K = shape, self.head_width
        D, positions = self.query.in_features, self._positions[0]
        layers = [self.query, self.key, self.value, self.out, self.span]
        layers += [] if self.value_gates is None else [self.value_gates]
        total = sum(flops(layer, shape) for layer in layers)
        for W in self._windows(T):
            M = _recalled(min(W, self.span.memory_length), shape)
            if not self.keeps_keys:
                total += 2 * (2 * M * D * K) / T  # keys and values of the memory
            total += 2 * (2 * W * K)  # scores and weighted sum
            if positions.has_keys:
                total += 2 * W * K
            total += flops(positions, shape) / self.num_heads * W / (B * T)  # once for all tokens
        if self.persistent is not None:
            total += 2 * (2 * self.persistent.keys_HPK.numel())
        return total

    def _filled(self, state: State) -> Tensor:
        """How many rows of the memory belong to the text."""
        if self.empty_start:
            return state.tensor("filled")
        leaves = [leaf for leaf in state.flatten().values() if leaf.dim() > 1]
        rows = max(leaf.shape[1] for leaf in leaves)
        return torch.full(leaves[0].shape[:1], rows, device=leaves[0].device)

    def _counters(self, state: State, *, new_tokens: int) -> dict[str, Tensor]:
        counted = {}
        if self.empty_start:
            counted["filled"] = (state.tensor("filled") + new_tokens).clamp(max=self.span.memory_length)
        if self._positions[0].counts:
            counted["read"] = state.tensor("read") + new_tokens
        return counted


def _recalled(longest: int, shape: Shape) -> float:
    """How many rows of its memory a block reads; the mean, if a text is cut into contexts."""
    if shape.context is None:
        return longest
    starts = range(0, shape.context, shape.block_length)
    return sum(min(longest, n) for n in starts) / len(starts)
