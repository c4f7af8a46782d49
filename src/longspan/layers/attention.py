"""The attention block: heads with their own spans over a memory of hidden states.

Shapes: B batch, T block, M memory, S = M + T, H heads, D width, K head width, G heads of one group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.kernels.span_attention import head_groups, span_attention
from longspan.layers.block import Block
from longspan.layers.head_rows import of_heads
from longspan.layers.positions import Positions
from longspan.layers.slots import PersistentSlots
from longspan.layers.span import Span
from longspan.state import State


class Attention(Block):
    """u = LN(h + Wo attention(Wq x, Wk [memory; x], Wv [memory; x])) with x = h; no biases.

    With `norm_first` u = h + Wo attention(...) with x = LN(h). The memory holds the last x, oldest first.
    With `norm_recalled` it holds the last h, and they are normed when they are recalled.
    A text begins with a memory of zeros that take part in the softmax, or, with `empty_start`, with nothing:
    the state then counts the rows that are filled. A position sees itself only with `sees_itself`.
    Beside the text every head may see persistent `slots`.

    The memory is projected anew with the current weights in every block. For decoding with fixed weights
    `decoding_state` replaces it by its keys and values.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        span: Span,
        positions: Positions,
        slots: PersistentSlots | None = None,
        head_width: int | None = None,
        dropout: float,
        output_dropout: float = 0.0,
        norm_first: bool,
        norm_recalled: bool = False,
        sees_itself: bool = False,
        empty_start: bool = False,
    ) -> None:
        super().__init__()
        if empty_start and not sees_itself:
            raise ValueError("the first position of a text that begins with nothing must see itself")
        self.num_heads = num_heads
        self.head_width = head_width or width // num_heads
        inner_width = num_heads * self.head_width
        self.query = nn.Linear(width, inner_width, bias=False)
        self.key = nn.Linear(width, inner_width, bias=False)
        self.value = nn.Linear(width, inner_width, bias=False)
        self.out = nn.Linear(inner_width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.span = span
        if not positions.shared:
            self.positions = positions
        self._positions = (positions,)  # in a tuple those that the model owns are not registered again
        self.slots = slots
        self.dropout = dropout
        self.output_dropout = output_dropout
        self.norm_first = norm_first
        self.norm_recalled = norm_first and norm_recalled
        self.sees_itself = sees_itself
        self.empty_start = empty_start

    def initial_state(self, batch_size: int) -> State:
        weight = self.query.weight
        shape = (batch_size, self.span.memory_length, weight.shape[1])
        memory = {"memory": torch.zeros(shape, dtype=weight.dtype, device=weight.device)}
        if self.empty_start:
            memory["filled"] = torch.zeros(batch_size, dtype=torch.long, device=weight.device)
        return State(memory)

    @torch.compiler.disable(reason="windows move while spans are learned: it would compile again and again")
    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        x_BTD = self.norm(h_BTD) if self.norm_first else h_BTD
        # Heads that are computed together lie together, by the order of the matrices' rows and columns.
        windows = self.span.windows_for(h_BTD.shape[1])
        groups = head_groups(windows)
        order = [head for heads in groups for head in heads]
        weight = torch.cat([self._rows(layer.weight, order) for layer in (self.query, self.key, self.value)])
        q_BHTK, k_BHTK, v_BHTK = self._split(F.linear(x_BTD, weight)).chunk(3, dim=1)
        sizes = [len(heads) for heads in groups]
        attended_BGTK = [
            self._attend(q_BGTK, k_BGTK, v_BGTK, state, heads, max(windows[head] for head in heads))
            for q_BGTK, k_BGTK, v_BGTK, heads in zip(
                q_BHTK.split(sizes, 1), k_BHTK.split(sizes, 1), v_BHTK.split(sizes, 1), groups, strict=True
            )
        ]
        merged_BTD = torch.cat(attended_BGTK, dim=1).transpose(1, 2).flatten(2)
        out_BTD = F.linear(merged_BTD, self._rows(self.out.weight.mT, order).mT)
        out_BTD = F.dropout(out_BTD, self.output_dropout, self.training)
        after = self._remember(h_BTD if self.norm_recalled else x_BTD, k_BHTK, v_BHTK, state, order)
        return (h_BTD + out_BTD if self.norm_first else self.norm(h_BTD + out_BTD)), after

    def decoding_state(self, state: State) -> State:
        if self.norm_recalled and not self.empty_start:
            return state  # a text begins with the norm's biases, and not with keys and values of zeros
        length = state.tensor("memory").shape[1]
        keys_BHMK, values_BHMK = self._recall(state, list(range(self.num_heads)), length)
        counter = {"filled": state.tensor("filled")} if self.empty_start else {}
        return State({"keys": keys_BHMK, "values": values_BHMK, **counter})

    def _attend(
        self, q_BGTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, state: State, heads: list[int], window: int
    ) -> Tensor:
        """One group of heads, over the block and the memory as far back as the longest of them sees."""
        past_k_BGMK, past_v_BGMK = self._recall(state, heads, window)
        spans_H = self.span.spans_H()
        terms = self._positions[0].terms(q_BGTK, window, heads)
        return span_attention(
            terms.content_q_BGTK,
            torch.cat([past_k_BGMK, k_BGTK], dim=2),
            torch.cat([past_v_BGMK, v_BGTK], dim=2),
            window=window,
            position_keys=terms.distance_keys,
            position_q=terms.distance_q,
            filled_B=self._filled(state) if self.sees_itself else None,
            first_distance=0 if self.sees_itself else 1,
            slots=None if self.slots is None else self.slots.of(heads),
            spans_H=None if spans_H is None else spans_H[heads],
            ramp=self.span.ramp,
            renormalise=self.span.renormalise,
            dropout=self.dropout if self.training else 0.0,
        )

    def _recall(self, state: State, heads: list[int], reach: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the last `reach` remembered positions for some of the heads."""
        if "keys" in state:
            near = (state.tensor(name)[:, :, -reach:] for name in ("keys", "values"))
            keys_BGMK, values_BGMK = (
                of_heads(x_BHMK.transpose(0, 1), heads).transpose(0, 1) for x_BHMK in near
            )
            return keys_BGMK, values_BGMK
        near_BMD = state.tensor("memory")[:, -reach:]
        if self.norm_recalled:
            near_BMD = self.norm(near_BMD)
        weight = torch.cat([self._rows(layer.weight, heads) for layer in (self.key, self.value)])
        keys_BGMK, values_BGMK = self._split(F.linear(near_BMD, weight)).chunk(2, dim=1)
        return keys_BGMK, values_BGMK

    def _filled(self, state: State) -> Tensor:
        """How many rows of the memory are there."""
        if self.empty_start:
            return state.tensor("filled")
        memory = state.tensor("keys" if "keys" in state else "memory")
        return torch.full(memory.shape[:1], memory.shape[-2], device=memory.device)

    def _remember(
        self, x_BTD: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, state: State, order: list[int]
    ) -> State:
        if "keys" in state:
            place = [order.index(head) for head in range(self.num_heads)]
            new = {"keys": k_BHTK[:, place], "values": v_BHTK[:, place]}
        else:
            new = {"memory": x_BTD}
        length = self.span.memory_length
        after = {name: _last(torch.cat([state.tensor(name), x], dim=-2), length) for name, x in new.items()}
        if self.empty_start:
            after["filled"] = (state.tensor("filled") + x_BTD.shape[1]).clamp(max=length)
        return State(after)

    def _rows(self, weight: Tensor, heads: list[int]) -> Tensor:
        """The rows of a matrix that belong to these heads, in their order."""
        by_head = torch.unflatten(weight, 0, (self.num_heads, self.head_width))
        return of_heads(by_head, heads).flatten(0, 1)

    def _split(self, x_BTD: Tensor) -> Tensor:
        """[B, T, heads x K] -> [B, heads, T, K], for any number of heads."""
        return torch.unflatten(x_BTD, -1, (-1, self.head_width)).transpose(1, 2)


def _last(x: Tensor, rows: int) -> Tensor:
    """The last so many rows, or all if there are fewer; none at all for 0."""
    return x[..., max(0, x.shape[-2] - rows) :, :]
