"""A layer of SHA-RNN for plain tensors. Shapes: B batch, T block, M memory, D width."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from longspan.layers.boom import Boom
from longspan.layers.lstm import LSTMBlock
from longspan.layers.sha_attention import SingleHeadAttention
from longspan.state import State


class SHABlock(nn.Module):
    """h = dropout(LSTM(LN(x)));    h = LN(h) + attention(h);    out = LN(h) + Boom(h)   (Merity, 2019)

    Attention has a single head over the last `memory_length` outputs of the LSTM, including the block. With a
    `memory_length` of 0 it sees only the block.

    `forward(x, memory)` returns the output and the memory after it, a dict of tensors with the batch first:

    | name | shape | |
    |---|---|---|
    | `lstm.hidden`, `lstm.cell` | [B, D] | the LSTM's state |
    | `attention.memory` | [B, M, D] | what attention sees of the past, oldest first |
    | `attention.filled` | [B] | how many rows of it are filled |

    Without a memory a text begins. Zeros in a row of every tensor let the text of this row begin anew. The
    memory carries gradients: detach its tensors between the blocks of truncated backpropagation.
    """

    def __init__(
        self,
        width: int,
        inner_width: int,
        *,
        memory_length: int,
        dropout: float = 0.0,
        epsilon: float = 1e-12,
    ) -> None:
        super().__init__()
        self.lstm = LSTMBlock(width, dropout=dropout, epsilon=epsilon)
        self.attention = SingleHeadAttention(
            width, memory_length=memory_length, dropout=dropout, epsilon=epsilon
        )
        self.boom = Boom(width, inner_width, dropout=dropout, epsilon=epsilon)

    def forward(
        self, x_BTD: Tensor, memory: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        before = State({}) if memory is None else State.unflatten(memory)
        after: dict[str, State] = {}
        h_BTD = x_BTD
        for name, block in (("lstm", self.lstm), ("attention", self.attention)):
            state = block.initial_state(len(x_BTD)) if memory is None else before.branch(name)
            h_BTD, after[name] = block(h_BTD, state)
        out_BTD, _ = self.boom(h_BTD, State({}))
        return out_BTD, State(after).flatten()
