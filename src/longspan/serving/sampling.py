"""Sampling the next token of many texts at once.

Every text draws from a generator of its own and gets the token that `generation.sample` would draw for it
alone. Shapes: N texts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longspan.serving.request import Sampling


@dataclass
class Draws:
    """How one text is sampled, and what was."""

    settings: Sampling
    generator: torch.Generator
    generated: set[int] = field(default_factory=set)


ROWS = 32
"""Texts that are drawn at once: for many more numbers, torch's sort is several times slower."""


def draw(log_probs_NV: Tensor, texts: Sequence[Draws]) -> list[int]:
    """One token for each text. No row may have NaN."""
    if len(texts) > ROWS:
        return draw(log_probs_NV[:ROWS], texts[:ROWS]) + draw(log_probs_NV[ROWS:], texts[ROWS:])
    scores_NV = log_probs_NV
    penalised = [
        n for n, text in enumerate(texts) if text.settings.repetition_penalty != 1 and text.generated
    ]
    if penalised:
        scores_NV = log_probs_NV.clone()
    for n in penalised:
        scores_NV[n, sorted(texts[n].generated)] *= texts[n].settings.repetition_penalty
    tokens_N = scores_NV.argmax(dim=-1)
    random = [n for n, text in enumerate(texts) if text.settings.temperature != 0]
    if random:
        chosen = [texts[n] for n in random]
        probs_NV = _distributions(scores_NV[random], [text.settings for text in chosen])
        waits_NV = torch.empty_like(probs_NV)
        for wait_V, text in zip(waits_NV, chosen, strict=True):
            wait_V.exponential_(1, generator=text.generator)
        # The first of V exponential clocks with these rates: as `torch.multinomial` draws one token.
        tokens_N[random] = torch.div(probs_NV, waits_NV).argmax(dim=-1)
    tokens: list[int] = tokens_N.tolist()
    for token, text in zip(tokens, texts, strict=True):
        text.generated.add(token)
    return tokens


def _distributions(scores_NV: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """`generation.sampling_distribution` with the settings of every row."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[:, None]

    below_best_NV = scores_NV - scores_NV.amax(dim=-1, keepdim=True)
    scaled_NV = (below_best_NV.double() / column([one.temperature for one in settings])).to(scores_NV.dtype)
    sorted_NV, order_NV = scaled_NV.sort(dim=-1, descending=True, stable=True)
    if any(one.top_k is not None for one in settings):
        kept_N1 = column([math.inf if one.top_k is None else one.top_k for one in settings])
        sorted_NV.masked_fill_(torch.arange(sorted_NV.shape[1]) >= kept_N1, -math.inf)
    probs_NV = sorted_NV.softmax(dim=-1)
    cut = [n for n, one in enumerate(settings) if one.top_p is not None and one.top_p < 1]
    if cut:
        probs_CV = probs_NV[cut]
        shares = [float(one.top_p) for one in settings if one.top_p is not None and one.top_p < 1]
        before_CV = probs_CV.cumsum(dim=-1) - probs_CV
        beyond_CV = before_CV >= column(shares).to(probs_CV.dtype)
        beyond_CV[:, 0] = False
        probs_CV = probs_CV.masked_fill(beyond_CV, 0.0)
        probs_NV[cut] = probs_CV / probs_CV.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs_NV).scatter(-1, order_NV, probs_NV)
