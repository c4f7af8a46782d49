"""The time of a matrix product on this machine (Grave et al., 2016, section 4.1).

Scoring B tokens against k words takes g(k, B) = c + lambda max(k B, F): small products take a constant time,
large ones a time in proportion to their scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.benchmark import Timer

_SIDES = [2**power for power in range(3, 14)]
_LONG_ENOUGH_S = 0.05  # of one product: long enough to see the proportional part
_MEASURED_S = 0.02  # at least this long per shape


@dataclass(frozen=True)
class ProductTime:
    """The three constants of g: seconds, seconds per score, scores."""

    constant: float
    per_score: float
    floor: float

    def seconds(self, scores: float) -> float:
        return self.constant + self.per_score * max(scores, self.floor)


@dataclass(frozen=True)
class Measured:
    """The measured time of a product with this many scores."""

    scores: int
    seconds: float


def measure(width: int, device: torch.device) -> list[Measured]:
    """Median times of float32 products, square, wide and tall, of growing size."""
    measured = []
    for side in _SIDES:
        for tokens, words in ((side, side), (side // 4, 4 * side), (4 * side, side // 4)):
            hidden = torch.randn(tokens, width, device=device)
            table = torch.randn(words, width, device=device)
            timer = Timer(
                "linear(hidden, table)",
                globals={"linear": torch.nn.functional.linear, "hidden": hidden, "table": table},
                num_threads=torch.get_num_threads(),
            )
            seconds = timer.blocked_autorange(min_run_time=_MEASURED_S).median
            measured.append(Measured(tokens * words, seconds))
        if max(point.seconds for point in measured) > _LONG_ENOUGH_S:
            break
    return measured


def fit(measured: Sequence[Measured]) -> ProductTime:
    """The constants with the least squared relative error: for each of many floors the rest is linear."""
    scores = np.array([point.scores for point in measured], dtype=np.float64)
    seconds = np.array([point.seconds for point in measured])
    best, least = ProductTime(0.0, 1.0, 0.0), np.inf
    for floor in np.geomspace(scores.min(), scores.max(), 400):
        terms = np.stack([np.ones_like(scores), np.maximum(scores, floor)], axis=1) / seconds[:, None]
        for free in ([0, 1], [1]):  # a negative constant makes no sense: use none then
            values = np.zeros(2)
            values[free] = np.linalg.lstsq(terms[:, free], np.ones_like(scores), rcond=None)[0]
            error = float(np.square(terms @ values - 1).sum())
            if values[0] >= 0 and values[1] > 0 and error < least:
                best, least = ProductTime(float(values[0]), float(values[1]), float(floor)), error
    return best


def typical_error(time: ProductTime, measured: Sequence[Measured]) -> float:
    """The median relative error of the fit."""
    return float(np.median([abs(time.seconds(point.scores) / point.seconds - 1) for point in measured]))
