"""Text and figures about runs, from their folders alone, and attention weights, which need the model.

Figures are imported when they are used, since matplotlib takes a moment.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longspan.inspection.architecture import ArchitectureHistory, read_architecture
from longspan.inspection.attention import LayerAttention, token_attention
from longspan.inspection.attention_by_distance import MeanAttention, mean_attention
from longspan.inspection.spans import SpanHistory, read_spans, spans_as_text

if TYPE_CHECKING:
    from longspan.inspection.architecture_figure import animate_architecture, draw_architecture
    from longspan.inspection.attention_figure import draw_attention
    from longspan.inspection.span_figure import draw_spans

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

_FIGURES = {
    "animate_architecture": "architecture_figure",
    "draw_architecture": "architecture_figure",
    "draw_attention": "attention_figure",
    "draw_spans": "span_figure",
}


def __getattr__(name: str) -> Any:
    if name not in _FIGURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FIGURES[name]}"), name)
