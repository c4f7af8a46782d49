"""A moving average of the weights: it scores what the weights would if they moved less."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from longspan.models.interface import LanguageModel


class Average:
    """a = a + max(1 - decay, 1 / t) (w - a) with the weights w after update t.

    That is the mean of all of them at first, and then a moving one.
    """

    def __init__(self, model: LanguageModel, decay: float) -> None:
        self.model = model
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Take in the weights after update number `step`, counted from 1."""
        moved = [p.detach() for p in self.model.parameters()]
        torch._foreach_lerp_(list(self.weights.values()), moved, max(1.0 - self.decay, 1.0 / step))

    def restore(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from an average that was saved."""
        for name, average in self.weights.items():
            average.copy_(weights[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the average for its weights, and whatever follows from them."""
        own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(own | self.weights)
        try:
            yield
        finally:
            self.model.load_state_dict(own)
