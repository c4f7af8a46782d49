"""What a model costs: FLOPs of the forward pass per token, two for each multiplication with an addition.

Counted are the products of matrices: projections (of the memory too, where it is projected anew in every
block), scores of content and distance and weighted sums over the window of each head, persistent vectors,
and the output head.
Norms, softmax and dropout are not. An adaptive softmax counts all clusters, as when all probabilities are
wanted; in training it computes a rare cluster only for the tokens that are in it, and costs less.
A window counts in full, also where a block or a context begins within it.
Shapes: B batch, T block, D width, K head width, M memory that a head sees, W its window.
"""

from __future__ import annotations

from functools import singledispatch
from typing import NamedTuple

from torch import nn

from longspan.layers.attention import Attention
from longspan.layers.embeddings import AdaptiveEmbedding
from longspan.layers.gumbel_block import GumbelBlock
from longspan.layers.lstm import LSTMBlock
from longspan.layers.positions import NoPositions, SinusoidDistances
from longspan.layers.rotary import RotaryPositions
from longspan.layers.sha_attention import SingleHeadAttention
from longspan.models.gpt import StackInContexts
from longspan.models.interface import LanguageModel
from longspan.models.stack import Stack
from longspan.output import AdaptiveSoftmaxHead, SoftmaxHead, SplitSoftmaxHead


class Shape(NamedTuple):
    """What is read at once: what is done once for a batch or a block is shared by its tokens."""

    batch_size: int
    block_length: int
    context: int | None = None  # a text is cut into contexts of this many tokens


def model_flops(model: LanguageModel, shape: Shape) -> float:
    """FLOPs per token of a whole model; of a supernet, with all candidates of every block."""
    if not isinstance(model, Stack):
        return flops(model, shape)
    if isinstance(model, StackInContexts):
        shape = shape._replace(context=model.context)
    ngrams = [] if model.ngrams is None else [model.ngrams]
    return sum(flops(part, shape) for part in (model.embedding, *ngrams, *model.blocks, model.head))


@singledispatch
def flops(part: nn.Module, shape: Shape) -> float:
    """FLOPs per token of a block, an embedding or a head.

    Unless a part says otherwise below, every matrix of its linear layers multiplies every token once.
    """
    return _matrices(part)


@flops.register
def _(block: Attention, shape: Shape) -> float:
    B, T, _ = shape
    D, K = block.query.in_features, block.head_width
    (positions,) = block._positions
    total = sum(map(_matrices, (block.query, block.key, block.value, block.out)))
    for W in block.span.windows_for(T):
        M = _recalled(min(W, block.span.memory_length), shape)
        if not block.keeps_keys:
            total += 2 * (2 * M * D * K) / T  # keys and values of the memory
        total += 2 * (2 * W * K)  # scores and weighted sum
        if not isinstance(positions, NoPositions | RotaryPositions):
            total += 2 * W * K
        if isinstance(positions, SinusoidDistances):
            total += 2 * W * D * K / (B * T)
    if block.persistent is not None:
        total += 2 * (2 * block.persistent.keys_HPK.numel())
    return total


@flops.register
def _(block: SingleHeadAttention, shape: Shape) -> float:
    B, T, _ = shape
    width = block.query.in_features
    keys = max(block.memory_length, T)
    return _matrices(block.query) + 2 * 2 * keys * width + _matrices(block.value_gate) / (B * T)


@flops.register
def _(block: LSTMBlock, shape: Shape) -> float:
    return sum(2.0 * weight.numel() for weight in block.lstm.parameters() if weight.ndim == 2)


@flops.register
def _(block: GumbelBlock, shape: Shape) -> float:
    return sum(flops(candidate, shape) for candidate in block.candidates.values())


@flops.register
def _(embedding: AdaptiveEmbedding, shape: Shape) -> float:
    return sum(2.0 * projection_DK.numel() for projection_DK in embedding.projections)


@flops.register
def _(head: SoftmaxHead, shape: Shape) -> float:
    return 2.0 * head.weight_VD.numel()


@flops.register
def _(head: AdaptiveSoftmaxHead, shape: Shape) -> float:
    return sum(
        2.0 * matrix.numel()
        for cluster in head._clusters()
        for matrix in (cluster.table_SK, cluster.projection_DK)
        if matrix is not None
    )


@flops.register
def _(head: SplitSoftmaxHead, shape: Shape) -> float:
    num_words, width = head.weight_VD.shape
    return 2.0 * (num_words + len(head.edges) - 1) * width


def _recalled(longest: int, shape: Shape) -> float:
    """How much of its memory a block reads; on average, where a text is cut into contexts."""
    if shape.context is None:
        return longest
    starts = range(0, shape.context, shape.block_length)
    return sum(min(longest, n) for n in starts) / len(starts)


def _matrices(part: nn.Module) -> float:
    return sum(2.0 * layer.weight.numel() for layer in part.modules() if isinstance(layer, nn.Linear))
