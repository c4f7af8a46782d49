"""Spans and memory in a modern transformer: RMSNorm, QK-norm, RoPE, no biases.

Every layer is attention over a memory and then feed-forward, both pre-norm; there are no biases:

    h = e_token;    h = h + Wo attention(N(h); memory);    h = h + W2 f(W1 N(h));    out = N(h)

- N(x) = g x / rms(x) is RMSNorm.
- n-gram embeddings and a short convolution over the last tokens may be added to e_token.
- Queries and keys have QK-norm per head, then RoPE.
- f(x) is relu(x)^2 or another activation; with SwiGLU, silu(W1 x) (V x) replaces f(W1 x).
- Logits may be soft-capped: c tanh(s / c).
- Options from the NanoGPT speedrun: value embeddings and offset keys (`Mix` in `kernels/qk_norm_rope`),
  weights of the residual stream (`layers/residual_stream.py`).
- The first feed-forward block may also read the token before (`layers/token_shift.py`).
- A position attends to itself and back as far as its head's span. A text starts with an empty memory.

Matrices are initialised with N(0, 1/width), those that write to the residual stream with zeros. So a new
model is its embedding and its head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.config import ModernConfig
from longspan.kernels.linear import squared_relu
from longspan.layers.attention import Attention
from longspan.layers.block import Block
from longspan.layers.build_span import build_span
from longspan.layers.dropout import GrowingDropout
from longspan.layers.feed_forward import FeedForward
from longspan.layers.ngrams import NgramEmbeddings
from longspan.layers.positions import LearnedDistanceKeys, NoPositions, Positions
from longspan.layers.residual_stream import ResidualStream
from longspan.layers.rms_norm import RMSNorm
from longspan.layers.rotary import RotaryPositions
from longspan.layers.short_convolution import ShortConvolution
from longspan.layers.token_shift import ShiftedFeedForward
from longspan.models.stack import Stack
from longspan.output import SoftmaxHead

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "squared-relu": squared_relu,
    "swiglu": F.silu,
}


def modern(config: ModernConfig, vocabulary_size: int) -> Stack:
    norm = partial(RMSNorm, eps=1e-6)
    positions = _positions(config)
    output_dropout: float | GrowingDropout = config.dropout
    if config.repeat_dropout > config.dropout:
        output_dropout = GrowingDropout(config.dropout, config.repeat_dropout)
    blocks: list[Block] = []
    if config.convolution:
        blocks.append(ShortConvolution(config.width, config.convolution, norm=norm))
    first_blocks: list[int] = []
    tables: dict[int, nn.Embedding] = {}
    for layer in range(config.num_layers):
        has_table = config.value_embeddings and (config.num_layers - layer) % 2 == 1
        if has_table:
            tables[len(blocks)] = _table_of_zeros(vocabulary_size, config.width)
        first_blocks.append(len(blocks))
        blocks += [
            Attention(
                config.width,
                config.num_heads,
                span=build_span(config.span, config.num_heads, config.width),
                positions=positions,
                dropout=config.dropout,
                output_dropout=output_dropout,
                norm_first=True,
                sees_itself=True,
                empty_start=True,
                norm=norm,
                qk_norm=config.qk_norm,
                memory=config.memory,
                value_gates=has_table,
                key_offset=config.key_offset,
                initial_gain=config.qk_gain,
            ),
            (ShiftedFeedForward if config.token_shift and layer == 0 else FeedForward)(
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
            dropout_epochs=config.ngram_dropout_epochs,
        )
    return Stack(
        embedding,
        blocks,
        head,
        shared={"positions": positions} if positions.shared else None,
        final_norm=norm(config.width),
        dropout=output_dropout,
        inputs=inputs,
        values=tables,
        residual=ResidualStream(first_blocks) if config.residual_scalars else None,
    )


def _table_of_zeros(vocabulary_size: int, width: int) -> nn.Embedding:
    table = nn.Embedding(vocabulary_size, width)
    nn.init.zeros_(table.weight)
    return table


def _positions(config: ModernConfig) -> Positions:
    if config.positions == "rotary":
        return RotaryPositions(config.rope_base, config.rope_fraction)
    if config.positions == "learned":
        return LearnedDistanceKeys(config.span.limit, config.width // config.num_heads)
    return NoPositions()


def _embedding_and_head(config: ModernConfig, vocabulary_size: int) -> tuple[nn.Embedding, SoftmaxHead]:
    """The embedding is normed before use, so its scale is free; the head must start small."""
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
