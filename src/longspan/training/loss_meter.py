"""The mean loss since the last line of metrics.

Losses stay on the device until they are read, so steps run without synchronising.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan import distributed


@dataclass(frozen=True)
class BadLoss:
    """The first step whose loss is not finite."""

    step: int
    learning_rate: float
    loss: float


class LossMeter:
    """Sums nats, tokens and seconds over steps."""

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self._nats = 0.0  # of the losses read so far, added in order
        self._waiting: list[tuple[Tensor, int, float]] = []

    def add(self, nats: Tensor, tokens: int, step: int, learning_rate: float) -> None:
        self._waiting.append((nats, step, learning_rate))
        self.tokens += tokens

    def read(self) -> BadLoss | None:
        """Read pending losses from the device, which synchronises. Returns the first that is not finite.

        Every rank has the nats of its own lanes: here they are added up.
        """
        if not self._waiting:
            return None
        values = distributed.summed(torch.stack([nats for nats, _, _ in self._waiting])).tolist()
        for value, (_, step, rate) in zip(values, self._waiting, strict=True):
            if not math.isfinite(value):
                return BadLoss(step, rate, value)
            self._nats += value
        self._waiting = []
        return None

    @property
    def loss(self) -> float:
        """Nats per token, over the losses read so far."""
        return self._nats / self.tokens

    def to_json(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "seconds": self.seconds, "nats": self._nats}

    @staticmethod
    def from_json(facts: dict[str, Any]) -> LossMeter:
        meter = LossMeter()
        meter.tokens, meter.seconds, meter._nats = facts["tokens"], facts["seconds"], facts["nats"]
        return meter
