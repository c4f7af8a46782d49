"""The span module that a configuration asks for."""

from __future__ import annotations

from longspan.config import SpanConfig
from longspan.layers.dynamic_span import DynamicSpan
from longspan.layers.learned_span import LearnedSpan
from longspan.layers.span import FixedSpan, Span


def build_span(config: SpanConfig, num_heads: int, width: int) -> Span:
    """`width` is that of the input of the attention layer."""
    if config.kind == "dynamic":
        return DynamicSpan.from_config(config, num_heads, width)
    if config.kind == "learned":
        return LearnedSpan.from_config(config, num_heads)
    return FixedSpan(num_heads, config.limit, config.growth)
