"""QK-norm, RoPE and K/V packing: between the projection and attention.

Every position has rows for its heads: queries (or none), as many keys, as many values. With gains g

    q = g_h q / rms(q),    k = k / rms(k),    rms(x)^2 = mean(x^2) + 1e-6

and with RoPE, position n rotates the pair (x_i, x_{i+E}) of a query or key by n base^(-i/P):

    out_i     = x_i cos(angle) - x_{i+E} sin(angle)
    out_{i+E} = x_i sin(angle) + x_{i+E} cos(angle),    i = 0 ... P - 1,  P <= E = K / 2

The pairs from P on are not rotated: P = fraction E, rounded. Before all this values may be added to, and
keys get pairs of the position before (`Mix`).
Row t of a text that has read `first` tokens is at position first + t. Angles are computed in float64, so that
they are exact for any position. Values are not changed.

`reference.py` is the specification, in loops; `eager.py` is plain torch; `triton_kernels.py` does it in one
pass over the memory of a GPU. `qk_norm_rope` is the entry point.

Shapes: B batch, T positions, H heads, K head width, R = 3H rows (2H without queries), X = 2H, S pairs.
"""

from __future__ import annotations

from torch import Tensor

from longspan.kernels.dispatch import use_triton
from longspan.kernels.qk_norm_rope import eager
from longspan.kernels.qk_norm_rope.eager import PURE, QKV, Mix, Rope, rotated_pairs

PLAIN = Rope()

__all__ = ["PURE", "QKV", "Mix", "Rope", "qk_norm_rope", "rotated_pairs"]


def qk_norm_rope(
    rows_BTRK: Tensor,
    heads: int,
    *,
    gain_H: Tensor | None = None,
    first_B: Tensor | None = None,
    rope: Rope = PLAIN,
    mix: Mix = PURE,
) -> QKV:
    """Queries, keys and values of these heads: normed if there is `gain_H`, rotated if there is `first_B`."""
    given = rows_BTRK, heads, gain_H, first_B, rope, mix
    changes = any(x is not None for x in (gain_H, first_B, *mix))
    if not changes or not use_triton(rows_BTRK):
        return eager.qk_norm_rope(*given)
    from longspan.kernels.qk_norm_rope import triton_kernels

    return triton_kernels.qk_norm_rope(*given)
