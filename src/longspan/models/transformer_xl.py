"""Transformer-XL: Attentive Language Models beyond a Fixed-Length Context (Dai et al., 2019).

Every layer is attention over the block and a memory of the layer's past inputs, and then feed-forward:

    u = LN(h + attention(h; memory));    out = LN(u + W2 relu(W1 u + b1) + b2)

Relative positions are projected sinusoids of the distance, with two learned biases (section 3.3):

    score(i, d) = ((q_i + u) . k_{i-d} + (q_i + v) . R sinusoid(d)) / sqrt(K),    d = 0, 1, ...

Embeddings are multiplied by sqrt(width).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from longspan.config import TransformerXLConfig
from longspan.config.transformer_xl import XLVocabularyConfig
from longspan.layers.attention import Attention
from longspan.layers.block import Block
from longspan.layers.build_span import build_span
from longspan.layers.embeddings import AdaptiveEmbedding
from longspan.layers.feed_forward import FeedForward
from longspan.layers.identity import Identity
from longspan.layers.persistent_memory import PersistentMemory
from longspan.layers.positions import QueryBiases, SinusoidDistances
from longspan.layers.span import FixedSpan, Span, WholeMemory
from longspan.models.pattern import Arrange, by_pattern, registered_makers
from longspan.models.stack import Stack
from longspan.output import AdaptiveSoftmaxHead


def transformer_xl(
    config: TransformerXLConfig, vocabulary_size: int, arrange: Arrange | None = None
) -> Stack:
    """The stack with the configuration's pattern, or with the blocks that `arrange` makes."""
    head_width = config.head_width or config.width // config.num_heads
    norm_first = config.norm == "pre"
    biases = QueryBiases(config.num_heads, head_width) if config.biases == "shared" else None

    def attention(memory_length: int) -> Attention:
        return Attention(
            config.width,
            config.num_heads,
            head_width=head_width,
            span=_span(config, memory_length),
            positions=SinusoidDistances(
                config.width,
                config.num_heads,
                head_width,
                biases=biases,
                clamp=config.clamp_length,
                dropout=config.dropout,
            ),
            persistent=_persistent(config, head_width),
            dropout=config.attention_dropout,
            output_dropout=config.dropout,
            norm_first=norm_first,
            norm_recalled=True,
            sees_itself=True,
            empty_start=config.start == "empty",
        )

    makers: dict[str, Callable[[], Block]] = {
        "s": partial(attention, config.memory_length),
        "f": lambda: FeedForward(
            config.width,
            config.inner_width,
            dropout=config.dropout,
            output_dropout=config.dropout,
            norm_first=norm_first,
        ),
        "i": Identity,
        **registered_makers(config),
    }
    if config.long_memory_length is not None:
        makers["l"] = partial(attention, config.long_memory_length)
    blocks = (arrange or by_pattern(config.pattern, config.num_layers))(makers)
    embedding, head = _embedding_and_head(config.vocabulary, config.width, vocabulary_size)
    model = Stack(
        embedding,
        blocks,
        head,
        shared={} if biases is None else {"biases": biases},
        dropout=config.dropout,
    )
    # If all of the memory is visible, the last position of a longer block sees further back.
    model.block_invariant = config.same_length or config.span is not None
    _initial_values(model)
    return model


def _span(config: TransformerXLConfig, memory_length: int) -> Span:
    if config.span is not None:
        return build_span(config.span, config.num_heads, config.width)
    if config.same_length:
        return FixedSpan(config.num_heads, memory_length)
    return WholeMemory(memory_length, config.num_heads)


def _persistent(config: TransformerXLConfig, head_width: int) -> PersistentMemory | None:
    size = config.num_persistent
    return PersistentMemory(config.num_heads, size, head_width) if size else None


def _embedding_and_head(
    config: XLVocabularyConfig, width: int, vocabulary_size: int
) -> tuple[AdaptiveEmbedding, AdaptiveSoftmaxHead]:
    only_head = config.divided == "head"
    embedding = AdaptiveEmbedding(
        vocabulary_size,
        width,
        cutoffs=config.cutoffs,
        division=1 if only_head else config.division,
        table_width=config.table_width,
        cluster_widths=() if only_head else config.cluster_widths,
        one_table=only_head or not config.narrows,
    )
    head = AdaptiveSoftmaxHead(
        embedding,
        tie_tables=config.tied,
        tie_projections=False if only_head else config.ties,
        cluster_order=config.cluster_order,
        division=config.division if only_head else None,
        cluster_widths=config.cluster_widths if only_head else (),
    )
    return embedding, head


def _initial_values(model: Stack) -> None:
    """As in the original: weights N(0, 0.02), projections of embedding and head N(0, 0.01), biases 0.

    Blocks of plugins keep their own initial values.
    """
    if any(weight.is_meta for weight in model.parameters()):  # nothing to fill, and torch takes long for it
        return
    plugins = [part for part in model.modules() if isinstance(part, Block) and part.from_plugin]
    left_alone = {module for block in plugins for module in block.modules()}
    for module in model.modules():
        if module in left_alone:
            continue
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, mean=1.0, std=0.02)
        elif isinstance(module, QueryBiases):
            nn.init.normal_(module.content_HK, std=0.02)
            nn.init.normal_(module.distance_HK, std=0.02)
        elif isinstance(module, (AdaptiveEmbedding, AdaptiveSoftmaxHead)):
            for name, weight in module.named_parameters():
                if "bias" not in name:
                    nn.init.normal_(weight, std=0.01 if name.startswith("projections") else 0.02)
