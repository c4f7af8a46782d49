"""Where the heads of an attention layer may look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longspan.config.schema import option


@dataclass(frozen=True, kw_only=True)
class SpanConfig:
    """Where a head may look."""

    kind: Literal["learned", "fixed"] = option("learned", help="learn spans, or use the limit")
    per: Literal["head", "layer"] = option(
        "head", help="learn one span for every head, or one for all of a layer"
    )
    limit: int = option(1024, help="the longest distance a head can look back, in tokens")
    ramp: int = option(32, help="over how many tokens the edge of a learned span falls from 1 to 0")
    windows: tuple[tuple[int, ...], ...] | None = option(
        None,
        help="fixed: how far each head of each layer looks, such as [[16, 64], [8, 128]] (default: limit)",
    )
    limit_shortest: int | None = option(
        None,
        help="let the limits of a layer's heads rise in geometric steps from this to limit: with a start "
        "above 0 they begin near and far, and none remembers beyond its own (default: one limit for all)",
    )
    start: float = option(0.0, help="learned spans at the start of training, as a fraction of the limit")
    penalty: float = option(0.0, help="loss per token of mean span in each layer")
    penalty_from: int = option(0, help="updates of the model before the penalty sets in")
    penalty_full: int = option(
        0, help="updates after which it has its full weight; it grows evenly till then"
    )
    memory: Literal["adaptive", "full"] = option(
        "adaptive", help="remember as far as the layer's longest head can see, or always up to the limit"
    )
    softmax_over: Literal["head", "layer"] = option(
        "head",
        help="softmax over each head's own span, or (as the original code) over the layer's longest; "
        "they differ only through the 1e-8 of the renormalisation",
    )
    renormalise: bool = option(
        True,
        help="let the weights inside a learned span sum to 1, or (as fairseq's code) to what the mask leaves",
    )

    def __post_init__(self) -> None:
        if self.limit < 1 or self.ramp < 1:
            raise ValueError("limit and ramp must be at least 1")
        if not 0.0 <= self.start <= 1.0:
            raise ValueError("start must lie between 0 and 1")
        if self.limit_shortest is not None and not 1 <= self.limit_shortest <= self.limit:
            raise ValueError(f"limit_shortest must lie between 1 and the limit, {self.limit}")
        if self.limit_shortest is not None and (self.per == "layer" or self.kind == "fixed"):
            raise ValueError("limit_shortest is for heads that each learn a span")
        if not self.penalty >= 0.0:
            raise ValueError("penalty must not be negative")
        if self.penalty_from < 0 or (self.penalty_full and self.penalty_full < self.penalty_from):
            raise ValueError("penalty_from must not be negative, nor penalty_full below it")
        self._check_windows()
        if not self.renormalise and self.softmax_over == "head":
            # Whatever is in the softmax takes its share of weight: heads cannot be cut to what they need.
            raise ValueError('without renormalise, softmax_over must be "layer"')

    def _check_windows(self) -> None:
        if self.windows is None:
            return
        if self.kind != "fixed":
            raise ValueError('windows are for kind = "fixed"')
        if not all(1 <= window <= self.limit for windows_H in self.windows for window in windows_H):
            raise ValueError(f"every window must lie between 1 and the limit, {self.limit}")
