"""Text and figures about runs, from their folders alone, and attention weights, which need the model."""

from longspan.inspection.architecture import ArchitectureHistory, read_architecture
from longspan.inspection.architecture_figure import animate_architecture, draw_architecture
from longspan.inspection.attention import LayerAttention, token_attention
from longspan.inspection.attention_by_distance import MeanAttention, mean_attention
from longspan.inspection.attention_figure import draw_attention
from longspan.inspection.span_figure import draw_spans
from longspan.inspection.spans import SpanHistory, read_spans, spans_as_text

__all__ = [
    "ArchitectureHistory",
    "LayerAttention",
    "MeanAttention",
    "SpanHistory",
    "animate_architecture",
    "draw_architecture",
    "draw_attention",
    "draw_spans",
    "mean_attention",
    "read_architecture",
    "read_spans",
    "spans_as_text",
    "token_attention",
]
