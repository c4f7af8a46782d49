"""NorMuon: Muon whose neurons take steps of one size. Shapes: P parameters, N matrices, R rows, C columns.

L lines: the rows of a matrix, or its columns if it has more of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.distributed import local, summed
from longspan.optim.division import owned
from longspan.optim.muon import Muon, decay_cautiously, moves_like, rate_of
from longspan.optim.polar import POLAR_EXPRESS, SAFETY, orthogonal

EPSILON = 1e-10


class NorMuon(Muon):
    """Muon with a second moment for every line of a matrix (Li et al., 2025), by Polar Express.

    For every orthogonalised step o of a matrix, with lines o_l:

        v_l = β v_l + (1 - β) mean(o_l²)
        e_l = o_l / √v_l
        o   = e ‖o‖ / ‖e‖

    Lines are rows, that is neurons; in a matrix with more columns than rows they are columns, because its
    rows are orthogonal and have one length already. Momentum, rate and decay are those of Muon.

    The moments are whole on every rank, also of sharded parameters.
    """

    def __init__(
        self,
        parameters: Any,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        cautious: bool = False,
        beta2: float = 0.95,
    ) -> None:
        super().__init__(parameters, lr, momentum, weight_decay, cautious)
        self.defaults["beta2"] = beta2
        for group in self.param_groups:
            group.setdefault("beta2", beta2)

    def _orthogonal(self, x_NRC: Tensor) -> Tensor:
        return orthogonal(x_NRC, POLAR_EXPRESS, SAFETY)

    def _apply(self, parameters: list[Tensor], o_NRC: Tensor, group: dict[str, Any], sharded: bool) -> None:
        weights, moments = [local(p) for p in parameters], [self._moment(p) for p in parameters]
        shape, squares = parameters[0].shape, self._squares(o_NRC, parameters, sharded)
        across = _across(shape)
        torch._foreach_lerp_(moments, (squares / shape[across]).unbind(), 1 - group["beta2"])
        scales = torch.stack(moments).clamp(min=EPSILON).rsqrt()
        before, after = (x.sum(-1, keepdim=True) for x in (squares, squares * scales.square()))
        scales = scales * (before / after.clamp(min=EPSILON)).sqrt() * rate_of(shape, group)
        own = owned(shape[0]) if sharded and _divides_lines(shape) else slice(None)  # the lines of this rank
        lines = o_NRC.shape[1 if across == -1 else 2]
        moves = moves_like(weights, o_NRC * scales[:, own].reshape(len(o_NRC), lines).unsqueeze(across))
        decay = group["lr"] * group["weight_decay"]
        if decay and group["cautious"]:
            decay_cautiously(weights, moves, decay)
        elif decay:
            torch._foreach_mul_(weights, 1 - decay)
        torch._foreach_sub_(weights, moves)

    def _squares(self, o_NRC: Tensor, parameters: list[Tensor], sharded: bool) -> Tensor:
        """The sum of squares of every line of all whole parameters: [P, L], or [P, ..., L] of stacks."""
        shape, own = parameters[0].shape, local(parameters[0]).shape
        lengths = torch.linalg.vector_norm(o_NRC, dim=_across(shape), dtype=parameters[0].dtype)
        squares = lengths.square().view(len(parameters), *own[:-2], lengths.shape[1])
        if not sharded:
            return squares
        if _divides_lines(shape):
            filled = squares.new_zeros(len(parameters), shape[0], *squares.shape[2:])
            filled[:, owned(shape[0])] = squares
            squares = filled
        return summed(squares)

    def _moment(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "line_moment" not in state:
            state["line_moment"] = local(parameter).new_zeros(lines_shape(parameter.shape))
        moment: Tensor = state["line_moment"]
        return moment


def _across(shape: torch.Size) -> int:
    """The dimension that a line runs along."""
    return -1 if shape[-2] >= shape[-1] else -2


def lines_shape(shape: torch.Size) -> tuple[int, ...]:
    """The shape of the moments of a parameter: one number for each row or column."""
    return *shape[:-2], max(shape[-2:])


def _divides_lines(shape: torch.Size) -> bool:
    """Whether sharding, which divides the first dimension, gives a rank some lines; else, parts of all."""
    return len(shape) > 2 or shape[0] >= shape[1]
