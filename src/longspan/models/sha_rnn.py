"""Single Headed Attention RNN: Stop Thinking With Your Head (Merity, 2019).

Every layer is an LSTM and a feed-forward block without a second matrix, "Boom"; between them one layer, or
every layer, attends with a single head to what its LSTM has said before:

    h = LSTM(LN(h));    h = LN(h) + attention(h);    h = LN(h) + Boom(h)

All residuals are normed. The output layer uses the embedding's weights.
"""

from __future__ import annotations

import math
from itertools import groupby

import torch
from torch import Tensor, nn

from longspan.config import ShaRnnConfig
from longspan.heads import SplitSoftmaxHead
from longspan.layers.block import Block
from longspan.layers.boom import Boom
from longspan.layers.recurrent import Recurrent
from longspan.layers.sha_attention import SingleHeadAttention
from longspan.models.interface import LanguageModel
from longspan.models.stack import Stack
from longspan.models.waves import in_waves
from longspan.state import State

EPSILON = 1e-12  # of all norms
PIECES = 4  # of a block of text: an LSTM takes a fixed time for each, besides the time for its tokens


class ShaRnn(Stack):
    """A stack that is trained in waves on a GPU, from one block with attention to the next.

    Attention reads a block of text whole: what it forgets depends on how long that is.
    """

    def _through(self, h_BTD: Tensor, states: State) -> tuple[Tensor, State]:
        if h_BTD.is_cuda and torch.is_grad_enabled():
            return self._through_in_waves(h_BTD, states)
        return super()._through(h_BTD, states)

    def _through_in_waves(self, h_BTD: Tensor, states: State) -> tuple[Tensor, State]:
        after: dict[str, State | Tensor] = {}
        named = [(name, block) for name, block in self.blocks.named_children() if isinstance(block, Block)]
        for attends, run in groupby(named, lambda one: isinstance(one[1], SingleHeadAttention)):
            names, blocks = zip(*run, strict=True)
            before = [states.branch(name) for name in names]
            h_BTD, found = in_waves(blocks, h_BTD, before, num_pieces=1 if attends else PIECES)
            after |= zip(names, found, strict=True)
        return h_BTD, State(after)


def sha_rnn(config: ShaRnnConfig, vocabulary_size: int) -> Stack:
    width, dropout = config.width, config.dropout
    blocks: list[Block] = []
    for layer in range(config.num_layers):
        blocks.append(Recurrent(width, dropout=dropout, epsilon=EPSILON))
        if config.attends(layer):
            blocks.append(
                SingleHeadAttention(
                    width, memory_length=config.memory_length, dropout=dropout, epsilon=EPSILON
                )
            )
        blocks.append(Boom(width, config.inner_width, dropout=dropout, epsilon=EPSILON))
    embedding = nn.Embedding(vocabulary_size, width)
    head = SplitSoftmaxHead(embedding, config.splits)
    model = ShaRnn(embedding, blocks, head, dropout=config.embedding_dropout)
    # Once a text is longer than the memory, what is forgotten depends on how long the blocks are.
    model.block_invariant = config.attention == "none"
    _initialise(model, width)
    return model


def drop_memory(model: LanguageModel) -> None:
    """Let a model, trained or not, keep its LSTM states only: attention sees the block it is in."""
    for attention in _attentions(model):
        attention.memory_length = 0


def collapse_value_gates(model: LanguageModel) -> None:
    """Replace the gates of a trained model by the vectors they compute; the outputs stay the same."""
    for attention in _attentions(model):
        attention.collapse()


def _attentions(model: LanguageModel) -> list[SingleHeadAttention]:
    return [module for module in model.modules() if isinstance(module, SingleHeadAttention)]


def _initialise(model: Stack, width: int) -> None:
    """Small matrices; LSTMs, norms and scales keep the values they are made with."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.1 / math.sqrt(width))
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
