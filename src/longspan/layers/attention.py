"""The attention block: heads with their own spans over a memory of hidden states.

Shapes: B batch, T block, M memory, S = M + T, H heads, D width, K head width, G heads of one group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.kernels.span_attention import head_groups, span_attention
from longspan.layers.block import Block
from longspan.layers.positions import LearnedDistanceKeys
from longspan.layers.span import Span
from longspan.state import State


class Attention(Block):
    """u = LN(h + Wo attention(Wq h, Wk [memory; h], Wv [memory; h])); no biases.

    With `norm_first` u = h + Wo attention(...) of LN(h) and LN(memory). The memory holds the last inputs
    of this block, oldest first, as they came in. A text begins with a memory of zeros, and the zeros take
    part in the softmax, as in the original. A position does not see itself.

    The memory is projected anew with the current weights in every block. For decoding with fixed weights
    `decoding_state` replaces it by its keys and values.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        span: Span,
        positions: LearnedDistanceKeys,
        dropout: float,
        norm_first: bool,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_width = width // num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.span = span
        self.positions = positions
        self.dropout = dropout
        self.norm_first = norm_first

    def initial_state(self, batch_size: int) -> State:
        weight = self.query.weight
        shape = (batch_size, self.span.memory_length, weight.shape[1])
        return State({"memory": torch.zeros(shape, dtype=weight.dtype, device=weight.device)})

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        x_BTD = self.norm(h_BTD) if self.norm_first else h_BTD
        if "memory" in state:
            seen_BSD = torch.cat([state.tensor("memory"), h_BTD], dim=1)
            attended_BTD = self._attend(x_BTD, self.norm(seen_BSD) if self.norm_first else seen_BSD)
            state = State({"memory": self._last(seen_BSD)})
        else:
            keys_BHSK, values_BHSK = (
                torch.cat([state.tensor(name), self._split(project(x_BTD))], dim=2)
                for name, project in (("keys", self.key), ("values", self.value))
            )
            attended_BTD = self._attend_projected(x_BTD, keys_BHSK, values_BHSK)
            state = State({"keys": self._last(keys_BHSK), "values": self._last(values_BHSK)})
        if self.norm_first:
            return h_BTD + self.out(attended_BTD), state
        return self.norm(h_BTD + self.out(attended_BTD)), state

    def decoding_state(self, state: State) -> State:
        memory_BMD = state.tensor("memory")
        if self.norm_first:
            memory_BMD = self.norm(memory_BMD)
        return State(
            {"keys": self._split(self.key(memory_BMD)), "values": self._split(self.value(memory_BMD))}
        )

    def _attend(self, x_BTD: Tensor, seen_BSD: Tensor) -> Tensor:
        """Keys and values are projected for each group of heads, only as far back as the group sees."""
        q_BHTK = self._split(self.query(x_BTD))
        out_GBTK: list[Tensor] = []
        groups = head_groups(self.span.windows)
        for heads in groups:
            reach = max(self.span.windows[head] for head in heads) + x_BTD.shape[1]
            near_BSD = seen_BSD[:, -reach:]
            k_BGSK, v_BGSK = (
                self._split(F.linear(near_BSD, self._rows(projection, heads)))
                for projection in (self.key, self.value)
            )
            out_GBTK += self._group(q_BHTK, k_BGSK, v_BGSK, heads).unbind(1)
        return self._merge(out_GBTK, groups)

    def _attend_projected(self, x_BTD: Tensor, keys_BHSK: Tensor, values_BHSK: Tensor) -> Tensor:
        q_BHTK = self._split(self.query(x_BTD))
        out_GBTK: list[Tensor] = []
        groups = head_groups(self.span.windows)
        for heads in groups:
            reach = max(self.span.windows[head] for head in heads) + x_BTD.shape[1]
            k_BGSK, v_BGSK = keys_BHSK[:, :, -reach:][:, heads], values_BHSK[:, :, -reach:][:, heads]
            out_GBTK += self._group(q_BHTK, k_BGSK, v_BGSK, heads).unbind(1)
        return self._merge(out_GBTK, groups)

    def _group(self, q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, heads: list[int]) -> Tensor:
        spans_H = self.span.spans_H()
        return span_attention(
            q_BHTK[:, heads],
            k_BGSK,
            v_BGSK,
            windows_H=[self.span.windows[head] for head in heads],
            position_keys_LK=self.positions.keys_LK,
            spans_H=None if spans_H is None else spans_H[heads],
            ramp=self.span.ramp,
            dropout=self.dropout if self.training else 0.0,
        )

    def _rows(self, projection: nn.Linear, heads: list[int]) -> Tensor:
        """The rows of a projection's matrix that make the vectors of these heads."""
        return projection.weight.unflatten(0, (self.num_heads, self.head_width))[heads].flatten(0, 1)

    def _split(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def _merge(self, out_GBTK: list[Tensor], groups: list[list[int]]) -> Tensor:
        """Outputs in the order of the groups, back in the order of the heads, side by side."""
        order = [head for heads in groups for head in heads]
        return torch.cat([out_GBTK[order.index(head)] for head in range(self.num_heads)], dim=-1)

    def _last(self, x: Tensor) -> Tensor:
        """The rows to remember: time is the last dimension but one."""
        return x[..., -self.span.memory_length :, :]
