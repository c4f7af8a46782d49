"""The temperature of a search, annealed over updates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longspan.config import SearchConfig


class AnnealedTemperature(nn.Module):
    """tau falls from `start` to `end` over `steps` updates and stays there.

    With x = min(1, updates / steps) it is start (end / start)^x or, linear, start + (end - start) x.
    The count is a tensor, saved with the weights: no forward pass synchronises, and a resumed run continues
    at the same temperature.
    """

    updates: Tensor

    def __init__(self, config: SearchConfig, steps: int) -> None:
        super().__init__()
        self.start = config.temperature_start
        self.end = self.start if config.temperature_schedule == "constant" else config.temperature_end
        self.exponential = config.temperature_schedule == "exponential"
        self.steps = steps
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    def forward(self) -> Tensor:
        x = (self.updates / self.steps).clamp(max=1.0)
        if self.exponential:
            return self.start * (self.end / self.start) ** x
        return self.start + (self.end - self.start) * x

    def after_update(self) -> None:
        self.updates.add_(1)

    def diagnostics(self) -> dict[str, Tensor]:
        return {"temperature": self()}
