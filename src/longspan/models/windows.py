"""Fixed windows per head, from the configuration or from learned spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from longspan.config import ModelConfig, SpanConfig
from longspan.errors import UserError
from longspan.layers.span import FixedSpan
from longspan.models.interface import LanguageModel


def set_windows(model: LanguageModel, windows_LH: Sequence[Sequence[int]]) -> None:
    """Set the window of each head of each layer."""
    spans = [module for module in model.modules() if isinstance(module, FixedSpan)]
    if len(windows_LH) != len(spans):
        raise UserError(
            f"span.windows has {len(windows_LH)} layers, but the model has {len(spans)} attention layers"
        )
    for span, windows in zip(spans, windows_LH, strict=True):
        span.set_windows(windows)


def with_frozen_spans(config: ModelConfig, model: LanguageModel) -> ModelConfig:
    """The configuration with fixed windows that cover the learned spans of `model`.

    The weights are those of `model` without the spans. Positions within the ramp of a span, which were
    partly masked, are fully visible.
    """
    learned_LH = model.diagnostics().get("spans_LH")
    span = getattr(config, "span", None)
    if not isinstance(span, SpanConfig) or learned_LH is None:
        raise UserError("this model has no learned spans: there is nothing to freeze")
    if not span.renormalise:  # its weights sum to less than 1, those of a window to 1
        raise UserError("spans with model.span.renormalise = false cannot be frozen: windows renormalise")
    windows = tuple(tuple(map(int, spans_H)) for spans_H in learned_LH.tolist())
    return replace(config, span=SpanConfig(kind="fixed", limit=span.limit, windows=windows))
