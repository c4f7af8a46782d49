"""LAMB (You et al., 2019), as used for SHA-RNN: Adam with steps scaled by the norm of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from longspan.compile_fallback import CompileFallback
from longspan.distributed import local
from longspan.optim.norms import norms
from longspan.optim.shards import local_gradients, with_gradients

EPSILON = 1e-6
LONGEST = 10.0  # upper bound of the weight norm in the trust ratio


class Lamb(Optimizer):
    """For every tensor p with gradient g, without bias correction:

        m  = β1 m + (1 - β1) g
        v  = β2 v + (1 - β2) g²
        u  = m / (√v + 1e-6) + decay · p
        p -= lr · trust · u          with trust = min(|p|, 10) / |u|

    Trust is at least `min_trust`, and 1 if p is all zeros. With a `min_trust` of 0 neither rule applies: a
    tensor of zeros stays zero.
    """

    # An attribute of the class, since torch copies and pickles no others of an optimizer.
    _compiled: Callable[..., None] | None = None

    def __init__(
        self,
        parameters: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        min_trust: float = 0.25,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "min_trust": min_trust}
        super().__init__(parameters, defaults)

    def compile(self, fallback: CompileFallback) -> None:
        """Compile the update into a few kernels."""
        compiled = torch.compile(_update)
        self._compiled = lambda *arguments: fallback.run(lambda: compiled(*arguments))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # A tensor, so that a new rate does not recompile.
            rate = torch.tensor(group["lr"], dtype=torch.float64)
            for parameters, sharded in with_gradients(group["params"]):
                (self._compiled or _update)(
                    [local(p) for p in parameters],
                    local_gradients(parameters),
                    [local(self._average(p, "exp_avg")) for p in parameters],
                    [local(self._average(p, "exp_avg_sq")) for p in parameters],
                    rate,
                    group["betas"],
                    group["weight_decay"],
                    group["min_trust"],
                    sharded,
                )
        return loss

    def _average(self, parameter: Tensor, name: str) -> Tensor:
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        average: Tensor = state[name]
        return average


def _update(
    parameters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    rate: Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    min_trust: float,
    sharded: bool,
) -> None:
    beta1, beta2 = betas
    lengths = norms(parameters, sharded)
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    deviations = torch._foreach_sqrt(squares)
    torch._foreach_add_(deviations, EPSILON)
    moves = torch._foreach_div(means, deviations)
    if weight_decay:
        torch._foreach_add_(moves, parameters, alpha=weight_decay)
    rates = _trust(lengths, norms(moves, sharded), min_trust) * rate
    torch._foreach_mul_(moves, rates.unbind())
    torch._foreach_sub_(parameters, moves)


def _trust(lengths: Tensor, steps: Tensor, min_trust: float) -> Tensor:
    """The trust ratio of every tensor, from the norms of weights and updates."""
    lengths = lengths.clamp(max=LONGEST)
    trust = torch.where(steps > 0, lengths / steps, 1.0)
    return torch.where(lengths > 0, trust, 1.0).clamp(min=min_trust) if min_trust > 0 else trust
