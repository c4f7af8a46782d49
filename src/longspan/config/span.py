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
    start: float = option(0.0, help="learned spans at the start of training, as a fraction of the limit")
    penalty: float = option(0.0, help="loss per token of mean span in each layer")
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
        if not self.penalty >= 0.0:
            raise ValueError("penalty must not be negative")
        if not self.renormalise and self.softmax_over == "head":
            # Whatever is in the softmax takes its share of weight: heads cannot be cut to what they need.
            raise ValueError('without renormalise, softmax_over must be "layer"')
