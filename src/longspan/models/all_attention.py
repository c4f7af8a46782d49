"""Augmenting Self-attention with Persistent Memory (Sukhbaatar, Grave, Lample, Jegou, Joulin, 2019).

The all-attention network has only attention layers. Instead of feed-forward blocks, every head also attends
to persistent vectors, in the same softmax as the text (section 3):

    out = LN(h + attention(h; text and persistent vectors))

Positions, memory and learned spans are those of the adaptive-span transformer.
"""

from __future__ import annotations

from longspan.config import AllAttentionConfig
from longspan.layers.attention import Attention
from longspan.layers.build_span import build_span
from longspan.layers.persistent_memory import PersistentMemory
from longspan.layers.positions import LearnedDistanceKeys
from longspan.models.stack import Stack
from longspan.models.vocabulary import embedding_and_head


def all_attention(config: AllAttentionConfig, vocabulary_size: int) -> Stack:
    head_width = config.width // config.num_heads
    positions = LearnedDistanceKeys(config.span.limit, head_width)
    blocks = [
        Attention(
            config.width,
            config.num_heads,
            span=build_span(config.span, config.num_heads, config.width),
            positions=positions,
            persistent=PersistentMemory(config.num_heads, config.num_persistent, head_width),
            dropout=config.dropout,
            norm_first=False,
        )
        for _ in range(config.num_layers)
    ]
    embedding, head = embedding_and_head(config.vocabulary, config.width, vocabulary_size)
    return Stack(
        embedding,
        blocks,
        head,
        shared={"positions": positions},
        dropout=config.embedding_dropout,
    )
