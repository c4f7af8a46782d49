"""What a benchmark reports, and how each number is computed."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from longspan.bench.agreement import Agreement

BACKWARD_TOO = 3  # each matrix product of the forward pass has two in the backward pass


@dataclass(frozen=True)
class Work:
    """The tokens and FLOPs of one training step, and the speed of matrix products on this machine."""

    tokens: int
    flops_per_token_forward: float
    matrix_flops_per_second: float

    @property
    def flops(self) -> float:
        """Of forward and backward pass: matrix products over every head's own window, on any path."""
        return BACKWARD_TOO * self.flops_per_token_forward * self.tokens


@dataclass(frozen=True)
class Steps:
    """Timed training steps of one path; `peak_memory_bytes` is None if it cannot be measured."""

    path: str
    means: str
    seconds: list[float]
    peak_memory_bytes: int | None

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    def tokens_per_second(self, work: Work) -> float:
        return work.tokens / self.median_seconds

    def share_of_matrix_rate(self, work: Work) -> float:
        """FLOPs of a step, divided by the FLOPs that matrix products alone would do in the same time."""
        return work.flops / self.median_seconds / work.matrix_flops_per_second


@dataclass(frozen=True)
class Decoding:
    """Times of single tokens of one text, and the time to read all weights once."""

    seconds: list[float]
    reading_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return 1 / statistics.median(self.seconds)

    @property
    def floor_tokens_per_second(self) -> float:
        return 1 / self.reading_seconds

    @property
    def times_of_floor(self) -> float:
        return statistics.median(self.seconds) / self.reading_seconds


@dataclass(frozen=True)
class Figures:
    """Everything about one recipe."""

    recipe: str
    parameters: int
    vocabulary_size: int
    batch_size: int
    block_length: int
    precision: str
    spans: str  # "start", "profile", "fixed" or "none"
    mean_window: float | None
    agreement: Agreement | None
    work: Work
    steps: list[Steps]
    decoding: Decoding | None

    @property
    def speedup(self) -> float | None:
        """Speed of the fast path divided by that of the reference path."""
        if len(self.steps) < 2:
            return None
        reference, fast = self.steps
        return reference.median_seconds / fast.median_seconds

    def as_json(self) -> dict[str, Any]:
        table = asdict(self)
        table["work"]["flops_per_step"] = self.work.flops
        table["steps"] = [
            {
                **asdict(steps),
                "median_seconds": steps.median_seconds,
                "tokens_per_second": steps.tokens_per_second(self.work),
                "share_of_matrix_rate": steps.share_of_matrix_rate(self.work),
            }
            for steps in self.steps
        ]
        table["speedup"] = self.speedup
        if self.decoding is not None:
            table["decoding"] |= {
                "tokens_per_second": self.decoding.tokens_per_second,
                "floor_tokens_per_second": self.decoding.floor_tokens_per_second,
                "times_of_floor": self.decoding.times_of_floor,
            }
        return table
