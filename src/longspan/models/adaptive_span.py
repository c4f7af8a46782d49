"""Adaptive Attention Span in Transformers (Sukhbaatar, Grave, Bojanowski, Joulin, 2019).

Every layer is attention over a long memory followed by a feed-forward block, both post-norm:

    u = LN(h + attention(h));    out = LN(u + W2 relu(W1 u + b1) + b2)

Attention scores have a content term and a distance term, with one learned key per distance that all heads and
layers share (section 2). Each head learns its span, how far back it looks (section 3).
"""

from __future__ import annotations

from torch import nn

from longspan.config import AdaptiveSpanConfig
from longspan.layers.attention import Attention
from longspan.layers.build_span import build_span
from longspan.layers.feed_forward import FeedForward
from longspan.layers.identity import Identity
from longspan.layers.positions import LearnedDistanceKeys
from longspan.models.pattern import Arrange, Makers, by_pattern, registered_makers
from longspan.models.stack import Stack
from longspan.models.vocabulary import embedding_and_head


def adaptive_span(config: AdaptiveSpanConfig, vocabulary_size: int, arrange: Arrange | None = None) -> Stack:
    """The stack with the configuration's pattern, or with the blocks that `arrange` makes."""
    norm_first = config.norm == "pre"
    positions = LearnedDistanceKeys(config.span.limit, config.width // config.num_heads)
    makers: Makers = {
        "s": lambda: Attention(
            config.width,
            config.num_heads,
            span=build_span(config.span, config.num_heads, config.width),
            positions=positions,
            dropout=config.dropout,
            norm_first=norm_first,
        ),
        "f": lambda: FeedForward(
            config.width, config.inner_width, dropout=config.dropout, norm_first=norm_first
        ),
        "i": Identity,
        **registered_makers(config),
    }
    blocks = (arrange or by_pattern(config.pattern, config.num_layers))(makers)
    embedding, head = embedding_and_head(config.vocabulary, config.width, vocabulary_size)
    return Stack(
        embedding,
        blocks,
        head,
        shared={"positions": positions},
        final_norm=nn.LayerNorm(config.width) if norm_first else None,
        dropout=config.embedding_dropout,
    )
