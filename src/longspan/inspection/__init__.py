"""Text and figures about a run; everything here reads the run folder only, never the model."""

from longspan.inspection.architecture import ArchitectureHistory, read_architecture
from longspan.inspection.architecture_figure import animate_architecture, draw_architecture
from longspan.inspection.span_figure import draw_spans
from longspan.inspection.spans import SpanHistory, read_spans, spans_as_text

__all__ = [
    "ArchitectureHistory",
    "SpanHistory",
    "animate_architecture",
    "draw_architecture",
    "draw_spans",
    "read_architecture",
    "read_spans",
    "spans_as_text",
]
