"""Spans and memory in a transformer as it is built today.

Every layer is attention over a memory and then feed-forward, both pre-norm; there are no biases:

    h = e_token;    h = h + Wo attention(N(h); memory);    h = h + W2 f(W1 N(h));    out = N(h)

N(x) = g x / rms(x). n-grams may add to e_token what it means after the tokens right before it, and a short
convolution these tokens themselves. Queries and keys are normed in every head and then turned by their
position; f(x) is relu(x)^2, or another one, or silu(W1 x) (V x) in the place of f(W1 x). Scores of words may
be kept within a limit: c tanh(s / c). A position sees itself, and before it as far as its head's span goes; a
text begins with nothing.

Matrices begin as N(0, 1/width) and those that add to the residual stream as zeros: a fresh model is its
embedding and its head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.config import ModernConfig
from longspan.layers.attention import Attention
from longspan.layers.block import Block
from longspan.layers.dropout import GrowingDropout
from longspan.layers.feed_forward import FeedForward, squared_relu
from longspan.layers.ngrams import NgramEmbeddings
from longspan.layers.positions import LearnedDistanceKeys, NoPositions, Positions
from longspan.layers.rotary import RotaryPositions
from longspan.layers.short_convolution import ShortConvolution
from longspan.layers.span import build_span
from longspan.models.stack import Stack
from longspan.output import SoftmaxHead

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "squared-relu": squared_relu,
    "swiglu": F.silu,
}


def modern(config: ModernConfig, vocabulary_size: int) -> Stack:
    norm = partial(nn.RMSNorm, eps=1e-6)
    positions = _positions(config)
    output_dropout: float | GrowingDropout = config.dropout
    if config.repeat_dropout > config.dropout:
        output_dropout = GrowingDropout(config.dropout, config.repeat_dropout)
    blocks: list[Block] = []
    if config.convolution:
        blocks.append(ShortConvolution(config.width, config.convolution, norm=norm))
    for _ in range(config.num_layers):
        blocks += [
            Attention(
                config.width,
                config.num_heads,
                span=build_span(config.span, config.num_heads),
                positions=positions,
                dropout=config.dropout,
                output_dropout=output_dropout,
                norm_first=True,
                sees_itself=True,
                empty_start=True,
                norm=norm,
                qk_norm=config.qk_norm,
                memory=config.memory,
            ),
            FeedForward(
                config.width,
                config.inner_width,
                activation=_ACTIVATIONS[config.feed_forward],
                gated=config.feed_forward == "swiglu",
                dropout=0.0,
                output_dropout=output_dropout,
                norm_first=True,
                norm=norm,
                bias=False,
            ),
        ]
    _initial_values(blocks, config.width)
    embedding, head = _embedding_and_head(config, vocabulary_size)
    inputs = {}
    if config.ngrams:
        inputs["ngrams"] = NgramEmbeddings(
            vocabulary_size,
            config.width,
            sizes=config.ngrams,
            rows=config.ngram_rows,
            table_width=config.ngram_width,
            dropout=config.ngram_dropout,
        )
    return Stack(
        embedding,
        blocks,
        head,
        shared={"positions": positions} if positions.shared else None,
        final_norm=norm(config.width),
        dropout=output_dropout,
        inputs=inputs,
    )


def _positions(config: ModernConfig) -> Positions:
    if config.positions == "rotary":
        return RotaryPositions(config.rope_base)
    if config.positions == "learned":
        return LearnedDistanceKeys(config.span.limit, config.width // config.num_heads)
    return NoPositions()


def _embedding_and_head(config: ModernConfig, vocabulary_size: int) -> tuple[nn.Embedding, SoftmaxHead]:
    """What is read is normed before anything else happens to it; what predicts must begin small."""
    embedding = nn.Embedding(vocabulary_size, config.width)
    head = SoftmaxHead(
        config.width,
        vocabulary_size,
        bias=False,
        softcap=config.softcap,
        tied=embedding if config.tied else None,
    )
    nn.init.normal_(embedding.weight, std=0.1)
    nn.init.normal_(head.weight_VD, std=0.02)
    return embedding, head


def _initial_values(blocks: list[Block], width: int) -> None:
    for block in blocks:
        for layer in block.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=1 / math.sqrt(width))
        if isinstance(block, Attention):
            nn.init.zeros_(block.out.weight)
        elif isinstance(block, FeedForward):
            nn.init.zeros_(block.contract.weight)
