"""Update rules of dynamic evaluation (Krause et al., 2018, "Dynamic evaluation of neural sequence models").

theta_0 are the trained weights, g the gradient of the mean loss of the block that was just scored, eta the
rate, lambda the decay back to the trained weights.

    sgd:  theta <- theta - eta g + lambda (theta_0 - theta)

    rms:  theta <- theta - eta g / (r + epsilon m) + min(lambda r / m, 1) (theta_0 - theta)

r = sqrt(MS) has the root of the mean squared gradient of every weight, over blocks of the training text; m is
the mean of r. Weights that had large gradients in training are moved less and return faster. Two details are
ours: the mean leaves out weights that had no gradient in these blocks (rows of embeddings that did not
occur), and epsilon is relative to m, so that it means the same for every model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class Rule(ABC):
    """Changes `weights` in place, starting from the trained ones."""

    def __init__(self, weights: Sequence[Tensor], rate: float, decay: float) -> None:
        self.weights = [weight.detach() for weight in weights]
        self.trained = [weight.clone() for weight in self.weights]
        self.rate, self.decay = rate, decay

    @abstractmethod
    def step(self, gradients: Sequence[Tensor]) -> None:
        """One update."""


class Sgd(Rule):
    def step(self, gradients: Sequence[Tensor]) -> None:
        if self.decay:
            torch._foreach_lerp_(self.weights, self.trained, self.decay)
        torch._foreach_add_(self.weights, list(gradients), alpha=-self.rate)


class Squares(Rule):
    """Changes nothing, but adds up the squares of the gradients."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.sums, self.count = [torch.zeros_like(weight) for weight in weights], 0

    def step(self, gradients: Sequence[Tensor]) -> None:
        torch._foreach_addcmul_(self.sums, list(gradients), list(gradients))
        self.count += 1

    def means(self) -> list[Tensor]:
        return [total / self.count for total in self.sums]


class Rms(Rule):
    """`mean_squares` are those of the training gradients, one tensor per weight."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        rate: float,
        decay: float,
        mean_squares: Sequence[Tensor],
        epsilon: float = 0.1,
    ) -> None:
        super().__init__(weights, rate, decay)
        roots = [squares.sqrt() for squares in mean_squares]
        total = sum(float(root.sum(dtype=torch.float64)) for root in roots)
        mean = total / max(1, sum(int(root.count_nonzero()) for root in roots))
        mean = mean or 1.0  # no gradient at all: nothing moves
        self.divisors = [root + epsilon * mean for root in roots]
        self.decays = [(decay / mean * root).clamp(max=1.0) for root in roots]

    def step(self, gradients: Sequence[Tensor]) -> None:
        if self.decay:
            torch._foreach_lerp_(self.weights, self.trained, self.decays)
        torch._foreach_addcdiv_(self.weights, list(gradients), self.divisors, value=-self.rate)
