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
from longspan.optim.division import Compute, divided, divided_rows
from longspan.optim.polar import orthogonal, precise_enough
from longspan.optim.shards import local_gradients, with_gradients


class Muon(Optimizer):
    """Momentum with orthogonalised steps (Jordan et al., 2024). For every matrix p with gradient g:

        m  = μ m + (1 - μ) g
        o  = orthogonal((1 - μ) g + μ m)
        p  = (1 - lr · decay) p - 0.2 lr √max(R, C) · o

    The factor makes steps about as large as AdamW's (Liu et al., 2025), so learning rates of the two are
    comparable. Others use √max(1, R / C) in place of 0.2 √max(R, C): divide their rate by 0.2 √C, so that
    0.02 for 512 x 512 is 0.0044 here. A parameter [N, R, C] holds N matrices. The result is that of
    `torch.optim.Muon` with "match_rms_adamw", but all matrices of one shape are orthogonalised in the same
    batched products: on a GPU a few large ones instead of hundreds of small ones.

    With `cautious` decay (Chen et al., 2025) a weight decays only where the step also brings it nearer to 0,
    where o and p have the same sign.

    With several ranks each matrix is orthogonalised on one of them. All ranks must hold the same parameters:
    whole and with the same gradients, or sharded by FSDP2.
    """

    def __init__(
        self,
        parameters: Any,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        cautious: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "cautious": cautious}
        super().__init__(parameters, defaults)
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.ndim < 2:
                raise UserError(
                    f"{type(self).__name__} updates matrices, and one of its parameters has the shape "
                    f"{list(p.shape)}: give vectors and scalars to another optimizer, such as AdamW"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("cautious", False)  # older ones have none

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
        torch._foreach_lerp_(means, gradients, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(gradients, means, group["momentum"])

        def start(shape: torch.Size) -> tuple[list[Tensor], Callable[[], Tensor]]:
            alike = [i for i, other in enumerate(shapes) if other == shape]
            nesterov_NRC = torch.cat([_matrices(nesterov[i]) for i in alike])
            return [parameters[i] for i in alike], self._orthogonalised(nesterov_NRC, shape, sharded)

        started = map(start, dict.fromkeys(shapes))  # unique, in order of appearance
        # With several ranks a shape is communicated while the next ones are computed.
        for alike, wait in started if size() == 1 else list(started):
            self._apply(alike, wait(), group, sharded)

    def _orthogonal(self, x_NRC: Tensor) -> Tensor:
        return orthogonal(x_NRC)

    def _apply(self, parameters: list[Tensor], o_NRC: Tensor, group: dict[str, Any], sharded: bool) -> None:
        """Decay and step of parameters of one shape; of sharded ones, o has the rows of this rank."""
        rate, decay = rate_of(parameters[0].shape, group), group["lr"] * group["weight_decay"]
        weights = [local(p) for p in parameters]
        moves = moves_like(weights, o_NRC)
        if decay and group["cautious"]:
            decay_cautiously(weights, moves, decay)
        elif decay:
            torch._foreach_mul_(weights, 1 - decay)
        torch._foreach_add_(weights, moves, alpha=-rate)

    def _orthogonalised(self, x_NRC: Tensor, shape: torch.Size, sharded: bool) -> Callable[[], Tensor]:
        """The orthogonal matrices of parameters of one shape, divided over the ranks."""
        compute: Compute = self._orthogonal
        if size() == 1 or (sharded and len(shape) > 2):  # a shard of [N, R, C] has whole matrices
            return partial(compute, x_NRC)
        if sharded:
            return divided_rows(precise_enough(x_NRC), shape[0], compute)
        return divided(x_NRC, compute)

    def _mean(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        mean: Tensor = state["momentum_buffer"]
        return mean


def _matrices(parameter: Tensor) -> Tensor:
    """[R, C] as [1, R, C], and [..., R, C] as [N, R, C]."""
    return parameter.reshape(math.prod(parameter.shape[:-2]), *parameter.shape[-2:])


def rate_of(shape: torch.Size, group: dict[str, Any]) -> float:
    """What a step is multiplied by."""
    rate: float = 0.2 * group["lr"] * math.sqrt(max(shape[-2:]))
    return rate


def moves_like(weights: list[Tensor], o_NRC: Tensor) -> list[Tensor]:
    """The steps as tensors of the shape and type of the weights."""
    matrices = o_NRC.to(weights[0].dtype).split([len(_matrices(w)) for w in weights])
    return [matrix.view_as(w) for matrix, w in zip(matrices, weights, strict=True)]


def decay_cautiously(weights: list[Tensor], moves: list[Tensor], decay: float) -> None:
    """w = (1 - decay) w where w and its move have the same sign."""
    alike = torch._foreach_mul(weights, moves)
    torch._foreach_sign_(alike)
    torch._foreach_clamp_min_(alike, 0.0)
    torch._foreach_addcmul_(weights, alike, weights, value=-decay)
