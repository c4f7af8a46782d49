"""Attention in which every head looks back over its own span.

For a query at position t and a distance d = first, first + 1, ..., first + window - 1:

    score(t, d) = (q_t . k_{t-d} + q_t . p_d) / sqrt(K)
    a = softmax over the distances of score
    w(d) = a(d) m(d) / (sum_d a(d) m(d) + 1e-8),    m(d) = clamp((span + first - d) / ramp + 1, 0, 1)
    out_t = sum_d dropout(w(d)) v_{t-d}

Slots are further keys and values per head that are no positions: their score is q_t . k_slot / sqrt(K), they
take part in the same softmax and their m is 1. Without spans there is no m and w = a. Not renormalised,
w = a m: what the mask takes from a head, its slots do not get. Positions before the first key count as zero
keys and zero values; where it is told how many rows of the memory are filled, query t of a block sees the
distances up to t + filled and no others.

The position term may have queries of its own in the place of q_t, and every head may have its own p_d.
Renormalised, a window that reaches beyond every span (plus ramp) gives the same result as a longer one,
except for the share that the 1e-8 gets: so heads may be grouped, and each group given the window it needs.
Not renormalised, a longer window leaves less for the span.

`reference.py` is the specification, in loops; `eager.py` is the path in plain torch. `span_attention` is
the one door to them.

Shapes: B batch, T block, S = memory + T keys, H heads, K head width, L longest distance, W window,
P slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from longspan.kernels.span_attention.eager import span_attention
from longspan.kernels.span_attention.mask import soft_mask

SHORT = 128

__all__ = ["head_groups", "soft_mask", "span_attention"]


def head_groups(windows_H: Sequence[int]) -> list[list[int]]:
    """Which heads to compute together, so that no head pays for one that looks more than twice as far.

    Heads of one group share the longest window among them, and the keys and values projected for it.
    Windows up to `SHORT` go together: cutting finer costs more in small operations than it saves.
    """
    octave = {head: max(window - 1, SHORT - 1).bit_length() for head, window in enumerate(windows_H)}
    by_octave = sorted(octave, key=lambda head: (octave[head], head))
    return [list(heads) for _, heads in groupby(by_octave, key=octave.__getitem__)]
