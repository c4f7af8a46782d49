"""Options of adaptive span and all-attention, and the type of any model's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from longspan.config.pattern import block_options, check_pattern, letters
from longspan.config.schema import option, section
from longspan.config.span import SpanConfig
from longspan.config.vocabulary import VocabularyConfig


@dataclass(frozen=True, kw_only=True)
class AdaptiveSpanConfig:
    """The transformer of "Adaptive Attention Span in Transformers" (Sukhbaatar et al., 2019)."""

    num_layers: int = option(12, help="layers, each attention followed by feed-forward")
    pattern: str | None = option(
        None,
        help=lambda: (
            f"one letter per block: {letters('sfi')}; num_layers is then not used "
            "(default: sf for every layer)"
        ),
    )
    width: int = option(512, help="size of the hidden states")
    num_heads: int = option(8, help="attention heads per layer")
    inner_width: int = option(2048, help="inner size of the feed-forward layer")
    dropout: float = option(0.0, help="dropout on attention weights and inside the feed-forward layer")
    embedding_dropout: float = option(0.0, help="dropout on the embeddings and on the last layer's output")
    norm: Literal["post", "pre"] = option("post", help="post-norm (original) or pre-norm")
    span: SpanConfig = section(SpanConfig, help="where a head may look")
    vocabulary: VocabularyConfig = section(VocabularyConfig, help="embedding and output layer")
    blocks: dict[str, Any] = block_options()

    def __post_init__(self) -> None:
        _check_sizes(self, "num_layers", "width", "num_heads", "inner_width")
        if self.pattern is not None:
            check_pattern(self.pattern, own="sfi")
        _check_heads(self)
        _check_dropout(self)


@dataclass(frozen=True, kw_only=True)
class AllAttentionConfig:
    """The network of "Augmenting Self-attention with Persistent Memory" (Sukhbaatar et al., 2019)."""

    num_layers: int = option(18, help="layers of attention; there is no feed-forward")
    width: int = option(512, help="size of the hidden states")
    num_heads: int = option(8, help="attention heads per layer")
    num_persistent: int = option(
        1024, help="persistent vectors (keys and values) per head", old_name="num_slots"
    )
    dropout: float = option(0.0, help="dropout on attention weights, also of persistent vectors")
    embedding_dropout: float = option(0.0, help="dropout on the embeddings and on the last layer's output")
    span: SpanConfig = section(SpanConfig, help="where a head may look")
    vocabulary: VocabularyConfig = section(VocabularyConfig, help="embedding and output layer")

    def __post_init__(self) -> None:
        _check_sizes(self, "num_layers", "width", "num_heads", "num_persistent")
        _check_heads(self)
        _check_dropout(self)


ModelConfig: TypeAlias = Any
"""The registered dataclass of an architecture, ours or a user's."""


def _check_sizes(config: AdaptiveSpanConfig | AllAttentionConfig, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1")


def _check_heads(config: AdaptiveSpanConfig | AllAttentionConfig) -> None:
    if config.width % config.num_heads:
        raise ValueError(f"width {config.width} is not a multiple of num_heads {config.num_heads}")


def _check_dropout(config: AdaptiveSpanConfig | AllAttentionConfig) -> None:
    if not all(0.0 <= part < 1.0 for part in (config.dropout, config.embedding_dropout)):
        raise ValueError("dropout and embedding_dropout must be at least 0 and below 1")
