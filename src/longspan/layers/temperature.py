"""The temperature of a search: annealed over updates, or learned."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from longspan.config import SearchConfig


class Temperature(nn.Module):
    """tau, one number for all blocks of a search."""

    def forward(self) -> Tensor:
        raise NotImplementedError

    def diagnostics(self) -> dict[str, Tensor]:
        return {"temperature": self().detach()}


class AnnealedTemperature(Temperature):
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


class LearnedTemperature(Temperature):
    """tau = exp(log_tau) is a parameter: it starts at `start` and never falls below `end`."""

    def __init__(self, config: SearchConfig) -> None:
        super().__init__()
        self.log_tau = nn.Parameter(torch.tensor(math.log(config.temperature_start)))
        self.least = math.log(config.temperature_end)

    def forward(self) -> Tensor:
        return self.log_tau.exp()

    @torch.no_grad()
    def after_update(self) -> None:
        self.log_tau.clamp_(min=self.least)

    def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"no_decay": [self.log_tau]}


def build_temperature(config: SearchConfig, steps: int) -> Temperature:
    """The temperature of a search with this many updates."""
    if config.temperature_schedule == "learned":
        return LearnedTemperature(config)
    return AnnealedTemperature(config, steps)
