"""Muon, batched over all matrices of one shape. Shapes: N matrices, R rows, C columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from longspan.distributed import local, size
from longspan.errors import UserError
from longspan.optim.division import divided, divided_rows
from longspan.optim.shards import local_gradients, with_gradients

STEPS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7


class Muon(Optimizer):
    """Momentum with orthogonalised steps (Jordan et al., 2024). For every matrix p with gradient g:

        m  = μ m + (1 - μ) g
        o  = orthogonal((1 - μ) g + μ m)
        p  = (1 - lr · decay) p - 0.2 lr √max(R, C) · o

    The factor makes steps about as large as AdamW's (Liu et al., 2025), so learning rates of the two are
    comparable. A parameter [N, R, C] holds N matrices. The result is that of `torch.optim.Muon` with
    "match_rms_adamw", but all matrices of one shape are orthogonalised in the same batched products: on a GPU
    a few large ones instead of hundreds of small ones.

    With several ranks each matrix is orthogonalised on one of them. All ranks must hold the same parameters:
    whole and with the same gradients, or sharded by FSDP2.
    """

    def __init__(self, parameters: Any, lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.ndim < 2:
                raise UserError(
                    f"Muon updates matrices, and one of its parameters has the shape {list(p.shape)}: "
                    "give vectors and scalars to another optimizer, such as AdamW"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters, sharded in with_gradients(group["params"]):
                self._move(parameters, group, sharded)
        return loss

    def _move(self, parameters: list[Tensor], group: dict[str, Any], sharded: bool) -> None:
        shapes = [p.shape for p in parameters]  # of the whole parameters
        gradients = local_gradients(parameters)
        means = [local(self._mean(p)) for p in parameters]
        parameters = [local(p) for p in parameters]
        torch._foreach_lerp_(means, gradients, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(gradients, means, group["momentum"])
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])

        def start(shape: torch.Size) -> tuple[torch.Size, list[Tensor], Callable[[], Tensor]]:
            alike = [i for i, other in enumerate(shapes) if other == shape]
            nesterov_NRC = torch.cat([_matrices(nesterov[i]) for i in alike])
            return shape, [parameters[i] for i in alike], _orthogonalised(nesterov_NRC, shape, sharded)

        started = map(start, dict.fromkeys(shapes))  # unique, in order of appearance
        # With several ranks a shape is communicated while the next ones are computed.
        for shape, alike, wait in started if size() == 1 else list(started):
            rate = 0.2 * group["lr"] * math.sqrt(max(shape[-2:]))
            moves_NRC = wait().to(alike[0].dtype)
            matrices = moves_NRC.split([len(_matrices(p)) for p in alike])
            moves = [move.view_as(p) for move, p in zip(matrices, alike, strict=True)]
            torch._foreach_add_(alike, moves, alpha=-rate)

    def _mean(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        mean: Tensor = state["momentum_buffer"]
        return mean


def _matrices(parameter: Tensor) -> Tensor:
    """[R, C] as [1, R, C], and [..., R, C] as [N, R, C]."""
    return parameter.reshape(math.prod(parameter.shape[:-2]), *parameter.shape[-2:])


def _orthogonalised(x_NRC: Tensor, shape: torch.Size, sharded: bool) -> Callable[[], Tensor]:
    """`orthogonal` of the matrices of parameters of one shape, divided over the ranks."""
    if size() == 1 or (sharded and len(shape) > 2):  # a shard of [N, R, C] has whole matrices
        return partial(orthogonal, x_NRC)
    if sharded:
        return divided_rows(_precise_enough(x_NRC), shape[0], orthogonal)
    return divided(x_NRC, orthogonal)


def _precise_enough(x_NRC: Tensor) -> Tensor:
    """On a GPU bfloat16 is precise enough for a direction."""
    return x_NRC.bfloat16() if x_NRC.is_cuda else x_NRC


def orthogonal(x_NRC: Tensor) -> Tensor:
    """U S' V^T for each X = U S V^T, with all of S' near 1: five steps of X = a X + b X X^T X + c (X X^T)² X.

    On a GPU in bfloat16. A matrix of zeros stays zero.
    """
    if x_NRC.shape[1] > x_NRC.shape[2]:
        return orthogonal(x_NRC.mT).mT
    x_NRC = _precise_enough(x_NRC)
    a, b, c = QUINTIC
    x_NRC = x_NRC / x_NRC.norm(dim=(1, 2), keepdim=True).clamp(min=EPSILON)
    for _ in range(STEPS):
        gram_NRR = x_NRC @ x_NRC.mT
        mixed_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=b, alpha=c)
        x_NRC = torch.baddbmm(x_NRC, mixed_NRR, x_NRC, beta=a)
    return x_NRC
