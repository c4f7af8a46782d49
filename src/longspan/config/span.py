"""Where the heads of an attention layer may look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longspan.config.schema import option


@dataclass(frozen=True, kw_only=True)
class SpanConfig:
    """Where a head may look."""

    kind: Literal["learned", "fixed"] = option("learned", help="learn one span per head, or use the limit")
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

    def __post_init__(self) -> None:
        if self.limit < 1 or self.ramp < 1:
            raise ValueError("limit and ramp must be at least 1")
        if not 0.0 <= self.start <= 1.0:
            raise ValueError("start must lie between 0 and 1")
        if not self.penalty >= 0.0:
            raise ValueError("penalty must not be negative")
