"""Options of spans: how far back the heads of an attention layer look."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from longspan.config.schema import option


@dataclass(frozen=True, kw_only=True)
class SpanConfig:
    """How far back a head may look."""

    kind: Literal["learned", "dynamic", "fixed"] = option(
        "learned", help="learned spans, learned spans that depend on the input, or fixed windows"
    )
    per: Literal["head", "layer"] = option("head", help="one span per head, or one per layer")
    limit: int = option(1024, help="the longest distance a head can look back, in tokens")
    ramp: int = option(32, help="number of tokens over which the soft edge of a span falls from 1 to 0")
    windows: tuple[tuple[int, ...], ...] | None = option(
        None,
        help="fixed: the window of each head of each layer, such as [[16, 64], [8, 128]] (default: limit)",
    )
    limit_shortest: int | None = option(
        None,
        help="the limits of a layer's heads rise geometrically from this to limit; a head remembers no more "
        "than its own limit (default: one limit for all heads)",
    )
    growth: tuple[float, ...] = option(
        (),
        help="heads see only this part of their window or limit, one after the other in equal parts of the "
        "training, such as [0.25, 0.5, 1.0]; the last must be 1 (default: all of it from the beginning)",
    )
    start: float = option(
        0.0,
        help="learned spans at the start of training, as a fraction of the limit; dynamic spans start at "
        "0.018 or more",
    )
    penalty: float = option(0.0, help="loss per token of the mean span of each layer")
    penalty_from: int = option(0, help="updates before the penalty starts")
    penalty_full: int = option(
        0, help="updates after which the penalty has its full weight; it ramps in linearly"
    )
    memory: Literal["adaptive", "full"] = option(
        "adaptive", help="remember as far as the longest head of the layer sees, or always up to the limit"
    )
    softmax_over: Literal["head", "layer"] = option(
        "head",
        help="softmax over each head's own span, or over the longest of the layer (the original code); they "
        "differ only by the 1e-8 of the renormalisation",
    )
    renormalise: bool = option(
        True,
        help="renormalise the weights after the mask, so that they sum to 1; fairseq's code does not",
    )

    def __post_init__(self) -> None:
        if self.limit < 1 or self.ramp < 1:
            raise ValueError("limit and ramp must be at least 1")
        if not 0.0 <= self.start <= 1.0:
            raise ValueError("start must lie between 0 and 1")
        if self.limit_shortest is not None and not 1 <= self.limit_shortest <= self.limit:
            raise ValueError(f"limit_shortest must lie between 1 and the limit, {self.limit}")
        if self.limit_shortest is not None and (self.per == "layer" or self.kind != "learned"):
            raise ValueError("limit_shortest needs a learned span per head")
        if self.per == "layer" and self.kind == "dynamic":
            raise ValueError('dynamic spans are those of single heads: per must be "head"')
        if not self.penalty >= 0.0:
            raise ValueError("penalty must not be negative")
        if self.penalty_from < 0 or (self.penalty_full and self.penalty_full < self.penalty_from):
            raise ValueError("penalty_from must not be negative, nor penalty_full below it")
        self._check_windows()
        self._check_growth()
        if not self.renormalise and self.softmax_over == "head":
            # Every distance in the softmax takes a share of the weight: windows cannot be shortened.
            raise ValueError('without renormalise, softmax_over must be "layer"')

    def _check_windows(self) -> None:
        if self.windows is None:
            return
        if self.kind != "fixed":
            raise ValueError('windows need kind = "fixed"')
        if not all(1 <= window <= self.limit for windows_H in self.windows for window in windows_H):
            raise ValueError(f"every window must lie between 1 and the limit, {self.limit}")

    def _check_growth(self) -> None:
        if not self.growth:
            return
        if not self.growth[0] > 0 or any(b < a for a, b in itertools.pairwise(self.growth)):
            raise ValueError("growth must hold fractions above 0, none below the one before it")
        if self.growth[-1] != 1.0:
            raise ValueError(f"the last fraction of growth must be 1, not {self.growth[-1]}")
