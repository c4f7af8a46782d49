"""From a projection to what attention multiplies and remembers: normed, weighed, turned and laid together.

Every position has rows for its heads: queries (or none), as many keys, as many values. With gains g

    q = g_h q / rms(q),    k = k / rms(k),    rms(x)^2 = mean(x^2) + 1e-6

and with a base position n turns the pair (x_i, x_{i+E}) of a query or key by the angle n base^(-i/E):

    out_i     = x_i cos(angle) - x_{i+E} sin(angle)
    out_{i+E} = x_i sin(angle) + x_{i+E} cos(angle),    i = 0 ... E - 1,  E = K / 2

Row t of a text that has read `first` tokens stands at position first + t. Angles are made in float64: a
position may be any whole number. Values stay as they are.

`reference.py` is the specification, in loops; `eager.py` is plain torch; `triton_kernels.py` does it in one
pass over the memory of a GPU. `place` is the entry point.

Shapes: B batch, T positions, H heads, K head width, R = 3H rows (2H without queries), X = 2H.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from longspan.kernels.dispatch import use_triton
from longspan.kernels.qk_norm_rope import eager
from longspan.kernels.qk_norm_rope.eager import Placed

__all__ = ["Placed", "place"]


def place(
    rows_BTRK: Tensor,
    heads: int,
    *,
    gain_H: Tensor | None = None,
    first_B: Tensor | None = None,
    base: float = 10000.0,
) -> Placed:
    """Queries, keys and values of these heads: normed if there is `gain_H`, turned if there is `first_B`."""
    as_they_are = gain_H is None and first_B is None
    path = eager if as_they_are or not use_triton(rows_BTRK) else _gpu_backend()
    return path.place(rows_BTRK, heads, gain_H, first_B, base)


def _gpu_backend() -> ModuleType:
    from longspan.kernels.qk_norm_rope import triton_kernels

    return triton_kernels
