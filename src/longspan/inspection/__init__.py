"""Looking inside a run: everything here reads the run folder only, never the model."""

from longspan.inspection.span_figure import draw_spans
from longspan.inspection.spans import SpanHistory, read_spans, spans_as_text

__all__ = ["SpanHistory", "draw_spans", "read_spans", "spans_as_text"]
