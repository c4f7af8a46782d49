"""The losses since the last line of metrics.

A loss stays on the device until somebody wants to see it, so that steps need not wait for one another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class BadLoss:
    """The first step whose loss was not a number."""

    step: int
    learning_rate: float
    loss: float


class LossMeter:
    """Nats and tokens of the latest steps."""

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self._nats = 0.0  # of the steps that have been read, added in their order
        self._waiting: list[tuple[Tensor, int, float]] = []

    def add(self, nats: Tensor, tokens: int, step: int, learning_rate: float) -> None:
        self._waiting.append((nats, step, learning_rate))
        self.tokens += tokens

    def read(self) -> BadLoss | None:
        """Fetch what is still on the device, waiting for it, and say where it stopped being finite."""
        if not self._waiting:
            return None
        values = torch.stack([nats for nats, _, _ in self._waiting]).tolist()
        for value, (_, step, rate) in zip(values, self._waiting, strict=True):
            if not math.isfinite(value):
                return BadLoss(step, rate, value)
            self._nats += value
        self._waiting = []
        return None

    @property
    def loss(self) -> float:
        """Nats per token over what has been read."""
        return self._nats / self.tokens

    def to_json(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "seconds": self.seconds, "nats": self._nats}

    @staticmethod
    def from_json(facts: dict[str, Any]) -> LossMeter:
        meter = LossMeter()
        meter.tokens, meter.seconds, meter._nats = facts["tokens"], facts["seconds"], facts["nats"]
        return meter
