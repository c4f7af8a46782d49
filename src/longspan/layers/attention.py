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
from longspan.layers.slots import PersistentSlots
from longspan.layers.span import Span
from longspan.state import State


class Attention(Block):
    """u = LN(h + Wo attention(Wq x, Wk [memory; x], Wv [memory; x])) with x = h; no biases.

    With `norm_first` u = h + Wo attention(...) with x = LN(h). The memory holds the last x, oldest first.
    A text begins with a memory of zeros, and the zeros take part in the softmax, as in the original.
    A position does not see itself. Beside the text every head may see persistent `slots`.

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
        slots: PersistentSlots | None = None,
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
        self._positions = (positions,)  # the model owns them: in a tuple they are not registered again
        self.slots = slots
        self.dropout = dropout
        self.norm_first = norm_first

    def initial_state(self, batch_size: int) -> State:
        weight = self.query.weight
        shape = (batch_size, self.span.memory_length, weight.shape[1])
        return State({"memory": torch.zeros(shape, dtype=weight.dtype, device=weight.device)})

    @torch.compiler.disable(reason="windows move while spans are learned: it would compile again and again")
    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        x_BTD = self.norm(h_BTD) if self.norm_first else h_BTD
        # Heads that are computed together lie together, by the order of the matrices' rows and columns.
        groups = head_groups(self.span.windows)
        order = [head for heads in groups for head in heads]
        weight = torch.cat([self._rows(layer.weight, order) for layer in (self.query, self.key, self.value)])
        q_BHTK, k_BHTK, v_BHTK = self._split(F.linear(x_BTD, weight)).chunk(3, dim=1)
        sizes = [len(heads) for heads in groups]
        attended_BGTK = [
            self._attend(q_BGTK, k_BGTK, v_BGTK, state, heads)
            for q_BGTK, k_BGTK, v_BGTK, heads in zip(
                q_BHTK.split(sizes, 1), k_BHTK.split(sizes, 1), v_BHTK.split(sizes, 1), groups, strict=True
            )
        ]
        merged_BTD = torch.cat(attended_BGTK, dim=1).transpose(1, 2).flatten(2)
        out_BTD = F.linear(merged_BTD, self._rows(self.out.weight.mT, order).mT)
        after = self._remember(x_BTD, k_BHTK, v_BHTK, state, order)
        return (h_BTD + out_BTD if self.norm_first else self.norm(h_BTD + out_BTD)), after

    def decoding_state(self, state: State) -> State:
        keys_BHMK, values_BHMK = self._recall(state, list(range(self.num_heads)), self.span.memory_length)
        return State({"keys": keys_BHMK, "values": values_BHMK})

    def _attend(
        self, q_BGTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, state: State, heads: list[int]
    ) -> Tensor:
        """One group of heads, over the block and the memory as far back as the longest of them sees."""
        window = max(self.span.windows[head] for head in heads)
        past_k_BGMK, past_v_BGMK = self._recall(state, heads, window)
        spans_H = self.span.spans_H()
        return span_attention(
            q_BGTK,
            torch.cat([past_k_BGMK, k_BGTK], dim=2),
            torch.cat([past_v_BGMK, v_BGTK], dim=2),
            window=window,
            position_keys_LK=self._positions[0].keys_LK,
            slots=None if self.slots is None else self.slots.of(heads),
            spans_H=None if spans_H is None else spans_H[heads],
            ramp=self.span.ramp,
            dropout=self.dropout if self.training else 0.0,
        )

    def _recall(self, state: State, heads: list[int], reach: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the last `reach` remembered positions for some of the heads."""
        if "keys" in state:
            keys_BHMK, values_BHMK = state.tensor("keys"), state.tensor("values")
            return keys_BHMK[:, :, -reach:][:, heads], values_BHMK[:, :, -reach:][:, heads]
        near_BMD = state.tensor("memory")[:, -reach:]
        weight = torch.cat([self._rows(layer.weight, heads) for layer in (self.key, self.value)])
        keys_BGMK, values_BGMK = self._split(F.linear(near_BMD, weight)).chunk(2, dim=1)
        return keys_BGMK, values_BGMK

    def _remember(
        self, x_BTD: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, state: State, order: list[int]
    ) -> State:
        if "keys" in state:
            place = [order.index(head) for head in range(self.num_heads)]
            new = {"keys": k_BHTK[:, place], "values": v_BHTK[:, place]}
        else:
            new = {"memory": x_BTD}
        length = self.span.memory_length
        return State(
            {name: torch.cat([state.tensor(name), x], dim=-2)[..., -length:, :] for name, x in new.items()}
        )

    def _rows(self, weight: Tensor, heads: list[int]) -> Tensor:
        """The rows of a matrix that belong to these heads, in their order."""
        return torch.unflatten(weight, 0, (self.num_heads, self.head_width))[heads].flatten(0, 1)

    def _split(self, x_BTD: Tensor) -> Tensor:
        """[B, T, heads x K] -> [B, heads, T, K], for any number of heads."""
        return torch.unflatten(x_BTD, -1, (-1, self.head_width)).transpose(1, 2)
