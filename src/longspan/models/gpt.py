"""A GPT (Radford et al., 2018) whose heads may learn how far back they look (Sukhbaatar et al., 2019).

Positions are absolute and learned. Every layer is attention and then feed-forward, both pre-norm:

    h = e_token + p_n;    h = h + attention(LN(h));    h = h + W2 f(W1 LN(h) + b1) + b2;    out = LN(h)

f is GELU or ReLU. A position attends to itself and to earlier positions of its context. With spans, the
attention weights are multiplied by the soft mask of the head after the softmax, and renormalised.

The text is cut into contexts, and a token sees only its own: nothing is carried to the next context. Within a
context the state holds what was read, so the result does not depend on the block length.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.config import GptConfig, SpanConfig
from longspan.flops import Shape
from longspan.layers.absolute_positions import AbsolutePositions
from longspan.layers.attention import Attention
from longspan.layers.block import Block, Step, carried
from longspan.layers.build_span import build_span
from longspan.layers.feed_forward import FeedForward
from longspan.layers.positions import NoPositions
from longspan.models.stack import Stack
from longspan.models.vocabulary import embedding_and_head
from longspan.state import State


def gpt(config: GptConfig, vocabulary_size: int) -> Stack:
    span = config.span or SpanConfig(kind="fixed", limit=config.context)
    blocks: list[Block] = [AbsolutePositions(config.context, config.width, dropout=config.dropout)]
    for _ in range(config.num_layers):
        blocks += [
            Attention(
                config.width,
                config.num_heads,
                span=build_span(span, config.num_heads, config.width),
                positions=NoPositions(),
                dropout=config.dropout,
                output_dropout=config.dropout,
                norm_first=True,
                sees_itself=True,
                empty_start=True,
                output_bias=config.output_bias,
            ),
            FeedForward(
                config.width,
                config.inner_width,
                activation=F.gelu if config.activation == "gelu" else torch.relu,
                dropout=0.0,
                output_dropout=config.dropout,
                norm_first=True,
            ),
        ]
    embedding, head = embedding_and_head(config.vocabulary, config.width, vocabulary_size)
    model = StackInContexts(embedding, blocks, head, final_norm=nn.LayerNorm(config.width))
    model.context = config.context
    _initial_values(model, config.num_layers)
    return model


class StackInContexts(Stack):
    """A stack in which a row that has read a full `context` starts again, like a new text.

    When all rows start a context, the memory of attention has length 0. So the shape of the state shows that
    all contexts end together, and blocks of whole contexts are read without synchronising with the device.
    """

    context: int

    def initial_state(self, batch_size: int) -> State:
        return self._restarted(super().initial_state(batch_size))

    def shape_key(self, state: State) -> Hashable | None:
        return super().shape_key(state) if self._all_begin(state) else None

    def step_from(self, state: State) -> Step | None:
        return carried(self, self.decoding_state, state)

    def flops(self, shape: Shape) -> float:
        return super().flops(shape._replace(context=self.context))

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        # Otherwise one copy to the host tells where the context of each row ends: blocks are cut there.
        together = self._all_begin(state)
        read_B = state.branch("blocks").branch("0").tensor("read")
        read = [0] * len(read_B) if together else read_B.tolist()
        hidden, start, block = [], 0, tokens_BT.shape[1]
        while start < block:
            full = [row for row, count in enumerate(read) if count == self.context]
            if full:
                state = state.reset(full)
            read = [count % self.context for count in read]
            length = min(block - start, self.context - max(read))
            hidden_BTD, state = super().forward(tokens_BT[:, start : start + length], state)
            hidden.append(hidden_BTD)
            start, read = start + length, [count + length for count in read]
            if together and read[0] == self.context:
                state, read = self._restarted(state), [0] * len(read)
        return torch.cat(hidden, dim=1), state

    def _restarted(self, state: State) -> State:
        """The state with all rows at the beginning of a context."""
        blocks = state.branch("blocks")

        def restarted(block: Block, name: str) -> State:
            own = blocks.branch(name)
            return (own.map(_without_rows) if isinstance(block, Attention) else own).map(torch.zeros_like)

        return State({"blocks": self._each_block(restarted)})

    def _all_begin(self, state: State) -> bool:
        blocks = state.branch("blocks")
        remembering = (name for name, block in self.blocks.named_children() if isinstance(block, Attention))
        leaves = (leaf for name in remembering for leaf in blocks.branch(name).flatten().values())
        return not any(leaf.shape[1] for leaf in leaves if leaf.dim() > 1)


def _without_rows(leaf: Tensor) -> Tensor:
    """Memory of length 0; counters keep their shape."""
    return leaf[:, :0] if leaf.dim() > 1 else leaf


def _initial_values(model: Stack, num_layers: int) -> None:
    """As in GPT-2: N(0, 0.02), narrower for matrices that write to the residual stream; biases 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for block in model.blocks:
        if isinstance(block, Attention):
            nn.init.normal_(block.out.weight, std=0.02 / math.sqrt(2 * num_layers))
        elif isinstance(block, FeedForward):
            nn.init.normal_(block.contract.weight, std=0.02 / math.sqrt(2 * num_layers))
