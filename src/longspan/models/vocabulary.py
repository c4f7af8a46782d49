"""Builds the embedding and the output head of a model."""

from __future__ import annotations

from torch import nn

from longspan.config import VocabularyConfig
from longspan.layers.embeddings import AdaptiveEmbedding
from longspan.output import AdaptiveSoftmaxHead, OutputHead, SoftmaxHead


def embedding_and_head(
    config: VocabularyConfig, width: int, vocabulary_size: int
) -> tuple[nn.Embedding | AdaptiveEmbedding, OutputHead]:
    """Adaptive embedding and softmax if the configuration has cutoffs, else plain ones."""
    if not config.cutoffs:
        return nn.Embedding(vocabulary_size, width), SoftmaxHead(width, vocabulary_size)
    embedding = AdaptiveEmbedding(
        vocabulary_size,
        width,
        cutoffs=config.cutoffs,
        division=config.division,
        cluster_widths=config.cluster_widths,
    )
    head = AdaptiveSoftmaxHead(
        embedding,
        tie_tables=config.tied,
        tie_projections=config.tied,
        cluster_order=config.cluster_order,
    )
    return embedding, head
