"""Adagrad that limits the gradient norm of every tensor on its own (adaptive-span's optimizer)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

EPSILON = 1e-10


class Adagrad(Optimizer):
    """For every tensor p with gradient g of 2-norm n:

        sum += g²
        p   -= lr · min(1, clip / n) · g / (√sum + 1e-10)

    The clipping shortens the step only: the sum takes the whole gradient. A clip of 0 means none.
    """

    def __init__(self, parameters: Any, lr: float, clip: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "clip": clip})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._move(parameters, group["lr"], group["clip"])
        return loss

    def _move(self, parameters: list[Tensor], lr: float, clip: float) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        sums = [self._sum(p) for p in parameters]
        torch._foreach_addcmul_(sums, gradients, gradients)
        deviations = torch._foreach_sqrt(sums)
        torch._foreach_add_(deviations, EPSILON)
        moves = torch._foreach_div(gradients, deviations)
        if clip > 0:
            norms = torch.stack(torch._foreach_norm(gradients))
            torch._foreach_mul_(moves, (clip / (norms + EPSILON)).clamp(max=1.0).unbind())
        torch._foreach_add_(parameters, moves, alpha=-lr)

    def _sum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "sum" not in state:
            state["sum"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        total: Tensor = state["sum"]
        return total
