"""An exponential moving average (EMA) of the weights, used for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from longspan import distributed
from longspan.models.interface import LanguageModel


class Average:
    """a = a + max(1 - decay, 1 / t) (w - a) with the weights w after update t.

    At first this is the mean of all weights so far, then an exponential moving average.
    """

    def __init__(self, model: LanguageModel, decay: float) -> None:
        self.model = model
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Add the weights after update number `step`, counted from 1, to the average."""
        moved = distributed.by_placement(p.detach() for p in self.model.parameters())
        for averages, alike in zip(distributed.by_placement(self.weights.values()), moved, strict=True):
            torch._foreach_lerp_(averages, alike, max(1.0 - self.decay, 1.0 / step))

    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Continue from a saved average."""
        for name, average in self.weights.items():
            average.copy_(weights[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the average as its weights; loading it also calls `refresh`."""
        own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(own | self.weights)
        try:
            yield
        finally:
            self.model.load_state_dict(own)
