"""Loss by position in the block: how much a model gains from more context within a block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PositionLoss:
    """The scored tokens at positions `first` to `last` of all blocks; position 1 begins a block."""

    first: int
    last: int
    tokens: int
    nats: float

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens


def by_position(nats: Sequence[float], tokens: Sequence[int]) -> tuple[PositionLoss, ...]:
    """One entry per position at which tokens were scored, from the sums of every position.

    The sums are rounded to multiples of one power of two, about 1e-15 of the total. So they can be added in
    any order and grouping without rounding: parts always sum to exactly the same total.
    """
    total = math.fsum(nats)
    step = max(2.0 ** (math.frexp(total)[1] - 51), math.ulp(0.0))  # a total near 0 has no smaller step
    return tuple(
        PositionLoss(
            position, position, count, round(amount / step) * step if math.isfinite(total) else amount
        )
        for position, (amount, count) in enumerate(zip(nats, tokens, strict=True), start=1)
        if count
    )


def in_powers_of_two(positions: Sequence[PositionLoss]) -> list[PositionLoss]:
    """The same tokens in a few rows: position 1, 2, 3-4, 5-8, 9-16, ..."""
    groups: dict[int, list[PositionLoss]] = {}
    for entry in positions:
        groups.setdefault((entry.first - 1).bit_length(), []).append(entry)
    return [
        PositionLoss(
            group[0].first,
            group[-1].last,
            sum(entry.tokens for entry in group),
            sum(entry.nats for entry in group),
        )
        for group in groups.values()
    ]
