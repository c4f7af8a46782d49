"""Rotary positions: position n turns the pair (x_i, x_{i+E}) by the angle n base^(-i/E).

    out_i     = x_i cos(angle) - x_{i+E} sin(angle)
    out_{i+E} = x_i sin(angle) + x_{i+E} cos(angle),    i = 0 ... E - 1,  E = K / 2

Row t of a text that has read `first` tokens stands at position first + t. Angles are made in float64: a
position may be any whole number.

`reference.py` is the specification, in loops; `eager.py` is plain torch; `triton.py` does it in one pass over
the memory of a GPU. `rotate` is the one door to them. Shapes: B batch, T positions, H heads, K head width.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from longspan.kernels.rotation import eager

__all__ = ["rotate"]


def rotate(x_BTHK: Tensor, first_B: Tensor, base: float) -> Tensor:
    """Each row turned by its position."""
    fused = _fused_path() if x_BTHK.is_cuda and x_BTHK.dtype != torch.float64 else None
    return (fused or eager).rotate(x_BTHK, first_B, base)


@cache
def _fused_path() -> ModuleType | None:
    """The kernel, where Triton is installed."""
    try:
        from longspan.kernels.rotation import triton
    except ImportError:
        return None
    return triton
