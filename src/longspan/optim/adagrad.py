"""Adagrad with gradient clipping per tensor, the optimizer of adaptive span."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from longspan.compile_fallback import CompileFallback
from longspan.distributed import local
from longspan.optim.norms import norms
from longspan.optim.shards import local_gradients, with_gradients

EPSILON = 1e-10


class Adagrad(Optimizer):
    """For every tensor p with gradient g of 2-norm n:

        sum += g²
        p   -= lr · min(1, clip / n) · g / (√sum + 1e-10)

    Only the step is clipped: the sum uses the whole gradient. A clip of 0 means none.
    """

    # An attribute of the class, since torch copies and pickles no others of an optimizer.
    _compiled: Callable[..., None] | None = None

    def __init__(self, parameters: Any, lr: float, clip: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "clip": clip})

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
                    [local(self._sum(p)) for p in parameters],
                    rate,
                    group["clip"] or math.inf,
                    sharded,
                )
        return loss

    def _sum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "sum" not in state:
            state["sum"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        total: Tensor = state["sum"]
        return total


def _update(
    parameters: list[Tensor],
    gradients: list[Tensor],
    sums: list[Tensor],
    rate: Tensor,
    clip: float,
    sharded: bool,
) -> None:
    rates = (clip / (norms(gradients, sharded) + EPSILON)).clamp(max=1.0) * rate
    torch._foreach_addcmul_(sums, gradients, gradients)
    deviations = torch._foreach_sqrt(sums)
    torch._foreach_add_(deviations, EPSILON)
    moves = torch._foreach_div(gradients, deviations)
    torch._foreach_mul_(moves, rates.unbind())
    torch._foreach_sub_(parameters, moves)
