"""Single Headed Attention RNN: Stop Thinking With Your Head (Merity, 2019).

Every layer is an LSTM and "Boom", a feed-forward block without a second matrix. Between them one layer, or
every layer, has attention with a single head over earlier outputs of its LSTM:

    h = LSTM(LN(h));    h = LN(h) + attention(h);    h = LN(h) + Boom(h)

All residuals are normed. The output layer uses the embedding's weights, unless it is not `tied`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from longspan.config import ShaRnnConfig
from longspan.layers.block import Block
from longspan.layers.boom import Boom
from longspan.layers.lstm import LSTMBlock
from longspan.layers.sha_attention import SingleHeadAttention
from longspan.models.interface import LanguageModel
from longspan.models.pipeline import pipelined
from longspan.models.stack import NO_VALUES, Stack, Values
from longspan.output import SplitSoftmaxHead
from longspan.state import State

EPSILON = 1e-12  # of all norms
# In training on a GPU. cuDNN's LSTM kernels never run concurrently, so chunks only hide the other operations
# behind one LSTM. More chunks hide more, and each costs further kernel launches.
CHUNKS = 2


class ShaRnn(Stack):
    """A stack that is trained as a pipeline on a GPU, unless something has to be done around each block."""

    def _through(self, h_BTD: Tensor, states: State, values: Values = NO_VALUES) -> tuple[Tensor, State]:
        if CHUNKS > 1 and h_BTD.is_cuda and torch.is_grad_enabled() and self.around_block is None:
            return self._through_pipeline(h_BTD, states)
        return super()._through(h_BTD, states, values)

    def _through_pipeline(self, h_BTD: Tensor, states: State) -> tuple[Tensor, State]:
        named = {name: block for name, block in self.blocks.named_children() if isinstance(block, Block)}
        before = [states.branch(name) for name in named]
        h_BTD, after = pipelined(list(named.values()), h_BTD, before, CHUNKS)
        return h_BTD, State(dict(zip(named, after, strict=True)))


def sha_rnn(config: ShaRnnConfig, vocabulary_size: int) -> Stack:
    width, dropout = config.width, config.dropout
    blocks: list[Block] = []
    for layer in range(config.num_layers):
        blocks.append(LSTMBlock(width, dropout=dropout, epsilon=EPSILON, weight_drop=config.weight_drop))
        if config.attends(layer):
            blocks.append(
                SingleHeadAttention(
                    width, memory_length=config.memory_length, dropout=dropout, epsilon=EPSILON
                )
            )
        blocks.append(Boom(width, config.inner_width, dropout=dropout, epsilon=EPSILON))
    embedding = nn.Embedding(vocabulary_size, width)
    head = SplitSoftmaxHead(embedding, config.splits, tied=config.tied)
    model = ShaRnn(embedding, blocks, head, dropout=config.embedding_dropout)
    # Once a text is longer than the memory, the block length decides how much is dropped.
    model.block_invariant = config.attention == "none"
    _initialise(model, width)
    return model


def drop_memory(model: LanguageModel) -> None:
    """Set the attention memory of a model to length 0: attention sees only the current block of tokens."""
    for attention in _attentions(model):
        attention.memory_length = 0


def collapse_value_gates(model: LanguageModel) -> None:
    """Replace the value gates of a trained model by the vectors they compute; outputs stay the same."""
    for attention in _attentions(model):
        attention.collapse()


def _attentions(model: LanguageModel) -> list[SingleHeadAttention]:
    return [module for module in model.modules() if isinstance(module, SingleHeadAttention)]


def _initialise(model: Stack, width: int) -> None:
    """Small matrices; LSTMs, norms and scales keep their default initial values."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.1 / math.sqrt(width))
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
