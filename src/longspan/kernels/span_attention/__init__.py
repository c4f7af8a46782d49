"""Attention in which every head looks back over its own span.

For a query at position t and a distance d = first, first + 1, ..., first + window - 1:

    score(t, d) = (q_t . k_{t-d} + q_t . p_d) / sqrt(K)
    a = softmax over the distances of score
    w(d) = a(d) m(d) / (sum_d a(d) m(d) + 1e-8),    m(d) = clamp((span + first - d) / ramp + 1, 0, 1)
    out_t = sum_d dropout(w(d)) v_{t-d}

Without spans there is no m and w = a. Positions before the first key count as zero keys and zero values.
The window says how far a head must be computed; beyond it m is zero. A path may compute further, which
changes results only through the share that the 1e-8 gets.

`reference.py` is the specification, in loops; `eager.py` is the path in plain torch. `span_attention` is
the one door to them.

Shapes: B batch, T block, S = memory + T keys, H heads, K head width, L longest distance, W window.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torch import Tensor

from longspan.kernels.span_attention import eager
from longspan.kernels.span_attention.mask import soft_mask

EPSILON = 1e-8
SHORT = 128

__all__ = ["EPSILON", "head_groups", "soft_mask", "span_attention"]


def span_attention(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    *,
    windows_H: Sequence[int],
    position_keys_LK: Tensor | None = None,
    spans_H: Tensor | None = None,
    ramp: int = 1,
    first_distance: int = 1,
    dropout: float = 0.0,
) -> Tensor:
    """The attention described above, [B, H, T, K]; the last T keys belong to the block of queries.

    Row i of `position_keys_LK` belongs to distance `first_distance + i`. `spans_H` are in tokens and get
    a gradient. `dropout` acts on the weights and is off at 0.
    """
    return eager.span_attention(
        q_BHTK,
        k_BHSK,
        v_BHSK,
        window=max(windows_H),
        position_keys_LK=position_keys_LK,
        spans_H=spans_H,
        ramp=ramp,
        first_distance=first_distance,
        dropout=dropout,
        epsilon=EPSILON,
    )


def head_groups(windows_H: Sequence[int]) -> list[list[int]]:
    """Which heads to compute together, so that no head pays for one that looks more than twice as far.

    Heads of one group share the longest window among them, and the keys and values projected for it.
    Windows up to `SHORT` go together: cutting finer costs more in small operations than it saves.
    """
    octave = {head: max(window - 1, SHORT - 1).bit_length() for head, window in enumerate(windows_H)}
    by_octave = sorted(octave, key=lambda head: (octave[head], head))
    return [list(heads) for _, heads in groupby(by_octave, key=octave.__getitem__)]
