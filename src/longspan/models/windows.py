"""A window of its own for every head: given in the configuration, or what a model has learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from longspan.config import ModelConfig, SpanConfig
from longspan.errors import UserError
from longspan.layers.span import FixedSpan
from longspan.models.interface import LanguageModel


def set_windows(model: LanguageModel, windows_LH: Sequence[Sequence[int]]) -> None:
    """Let each head of each layer see as many positions as its window says."""
    spans = [module for module in model.modules() if isinstance(module, FixedSpan)]
    if len(windows_LH) != len(spans):
        raise UserError(
            f"the model has {len(spans)} layers with heads, and windows are given for {len(windows_LH)}"
        )
    for span, windows in zip(spans, windows_LH, strict=True):
        span.set_windows(windows)


def with_frozen_spans(config: ModelConfig, model: LanguageModel) -> ModelConfig:
    """The same model with the spans it has learned as fixed windows, which see all that the spans reach.

    Its weights are those of the learned model without the spans. What lay on the soft edge of a span, seen
    in part, is seen as a whole.
    """
    learned_LH = model.diagnostics().get("spans_LH")
    span = getattr(config, "span", None)
    if not isinstance(span, SpanConfig) or learned_LH is None:
        raise UserError("this model has learned no spans: there is nothing to freeze")
    windows = tuple(tuple(map(int, spans_H)) for spans_H in learned_LH.tolist())
    return replace(config, span=SpanConfig(kind="fixed", limit=span.limit, windows=windows))
