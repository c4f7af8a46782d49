"""Typical learned spans, so that a model with initial weights costs as much as a trained one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longspan.errors import UserError
from longspan.layers.learned_span import LearnedSpan
from longspan.layers.span import FixedSpan
from longspan.models import LanguageModel


def span_profile(num_layers: int, num_heads: int, limit: int) -> list[list[int]]:
    """Tokens per layer and head, without the ramp: most spans are short, a few of the upper layers long.

    Short spans are spread over 8 to 120. In the upper half of the layers head 0 has 600, 1100, 1600 ...
    tokens. Head 1 of the last two layers has 5000. No span exceeds the limit.
    """
    spans = [[8 + (37 * layer + 29 * head) % 113 for head in range(num_heads)] for layer in range(num_layers)]
    for above, layer in enumerate(range(num_layers // 2, num_layers)):
        spans[layer][0] = 600 + 500 * above
    if num_heads > 1:
        for layer in range(max(0, num_layers - 2), num_layers):
            spans[layer][1] = 5000
    return [[min(span, limit) for span in layer] for layer in spans]


def learned_spans(model: LanguageModel) -> list[LearnedSpan]:
    return [module for module in model.modules() if isinstance(module, LearnedSpan)]


def has_fixed_spans(model: LanguageModel) -> bool:
    return any(isinstance(module, FixedSpan) for module in model.modules())


def set_profile(model: LanguageModel, name: str) -> None:
    """Set the learned spans of a model to `span_profile`; if limits rise over the heads, so do the spans."""
    learned = learned_spans(model)
    if not learned:
        raise UserError(f"{name} has no learned spans: leave out '--spans profile'")
    limits = learned[0].limits
    spans_LH = span_profile(len(learned), len(limits), max(limits))
    if min(limits) < max(limits):
        spans_LH = [list(map(min, sorted(spans_H), limits)) for spans_H in spans_LH]
    set_spans(model, spans_LH)


def set_spans(model: LanguageModel, spans_LH: Sequence[Sequence[int]]) -> None:
    """Set the spans of every layer's heads, in tokens; heads that share a span get the longest."""
    with torch.no_grad():
        for span, tokens in zip(learned_spans(model), spans_LH, strict=True):
            if any(own > limit for own, limit in zip(tokens, span.limits, strict=True)):
                raise UserError(f"spans of {list(tokens)} exceed the limits of the heads, {span.limits}")
            fractions_H = torch.tensor(tokens) / torch.tensor(span.limits)
            shared = span.fraction_H.numel() == 1
            span.fraction_H.copy_(fractions_H.amax(0, keepdim=True) if shared else fractions_H)
    model.after_update()
