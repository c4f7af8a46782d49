"""Span attention for plain tensors.

Shapes: B batch, T block, M memory, H heads, K head width, W window, L >= W distances, P persistent vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.kernels import span_attention as kernel
from longspan.layers.head_groups import HeadGroups
from longspan.layers.select_heads import inverse, select_heads


def span_attention(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    *,
    window: int | Sequence[int],
    past: tuple[Tensor, Tensor] | None = None,
    spans: Tensor | None = None,
    ramp: int = 32,
    renormalise: bool = True,
    position_keys: Tensor | None = None,
    content_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    persistent: tuple[Tensor, Tensor] | None = None,
    sees_itself: bool = False,
    filled: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Causal attention in which every head looks back over its own span, [B, H, T, K].

    For a query at position t and the distances d = 1 ... window (with `sees_itself` 0 ... window - 1):

        score(d) = ((q_t + u) . k_{t-d} + (q_t + v) . p_d) / sqrt(K)
        a = softmax(score);    w = a m / (sum a m + 1e-8);    out_t = sum_d dropout(w(d)) v_{t-d}

    m is 1 inside a head's span, falls to 0 over `ramp` further positions, and is left out without `spans`.

    | argument | meaning |
    |---|---|
    | `q`, `k`, `v` | of the block, [B, H, T, K] |
    | `window` | how many distances all heads compute, or each head; use at least span + ramp + 1 |
    | `past` | keys and values of the positions before the block, [B, H, M, K] each, oldest first |
    | `spans` | in tokens, [H], as `LearnedSpan` gives, or [B, H, T], as `DynamicSpan`; they get a gradient |
    | `renormalise` | whether weights are divided by their sum after the soft mask |
    | `position_keys` | p_d, nearest first, [L, K] or [H, L, K], such as `LearnedDistanceKeys()` |
    | `content_bias`, `position_bias` | u and v, [H, K] each, such as those of `SinusoidDistances` |
    | `persistent` | further keys and values that every query sees, [H, P, K] each |
    | `filled` | [B]: how many of the last rows of `past` belong to the text (all); needs `sees_itself` |
    | `dropout` | probability with which a weight is dropped; pass 0 when not training |

    With `sees_itself` nothing before the past is seen. Otherwise positions before the first key are zero keys
    and values that take part in the softmax, since the first query must see something. Heads with spans may
    be computed over a longer window than their own. Dispatch picks the backend by device, dtype and options.
    """
    num_heads = q_BHTK.shape[1]
    windows_H = (window,) * num_heads if isinstance(window, int) else tuple(window)
    _check(q_BHTK, windows_H, past, spans, position_keys, filled, sees_itself)
    # If every distance in a window has weight, only heads with equal windows can be computed together.
    kinds_H = None if spans is not None and renormalise else windows_H
    heads = HeadGroups(windows_H, kernel.head_groups(windows_H, kinds_H=kinds_H))
    order = heads.order

    def ordered(x: Tensor | None) -> Tensor | None:
        return None if x is None else select_heads(x, order)

    context = kernel.AttentionContext(
        past=_by_group(k_BHTK, past, heads),
        windows=heads.ordered_windows,
        position_keys=ordered(position_keys)
        if position_keys is not None and position_keys.dim() == 3
        else position_keys,
        content_bias_HK=ordered(content_bias),
        position_bias_HK=ordered(position_bias),
        persistent=None
        if persistent is None
        else (select_heads(persistent[0], order), select_heads(persistent[1], order)),
        filled_B=_filled(k_BHTK, past) if sees_itself and filled is None else filled,
        spans=ordered(spans) if spans is None or spans.dim() == 1 else select_heads(spans, order, dim=1),
        ramp=ramp,
        renormalise=renormalise,
        first_distance=0 if sees_itself else 1,
        dropout=dropout,
        windows_follow_spans=renormalise and spans is not None,
    )
    q_BHTK, k_BHTK, v_BHTK = (select_heads(x, order, dim=1) for x in (q_BHTK, k_BHTK, v_BHTK))
    attended_BHTK = kernel.span_attention(q_BHTK, k_BHTK, v_BHTK, context)
    return select_heads(attended_BHTK, inverse(order), dim=1)


def _by_group(like_BHTK: Tensor, past: tuple[Tensor, Tensor] | None, heads: HeadGroups) -> list[Tensor]:
    """For every group the last rows that it sees: keys of its heads, then their values, [B, M, 2G, K]."""
    k_BHMK, v_BHMK = (like_BHTK[:, :, :0],) * 2 if past is None else past
    joined = []
    for group, reach in zip(heads.groups, heads.reaches, strict=True):
        near = (select_heads(x[:, :, max(0, x.shape[2] - reach) :], group, dim=1) for x in (k_BHMK, v_BHMK))
        # Under autocast the past may have been kept in another precision.
        joined.append(torch.cat(list(near), dim=1).transpose(1, 2).to(like_BHTK.dtype))
    return joined


def _check(
    q_BHTK: Tensor,
    windows_H: Sequence[int],
    past: tuple[Tensor, Tensor] | None,
    spans: Tensor | None,
    position_keys: Tensor | None,
    filled: Tensor | None,
    sees_itself: bool,
) -> None:
    num_heads = q_BHTK.shape[1]
    if len(windows_H) != num_heads or min(windows_H) < 1:
        raise UserError(f"window must be at least 1, one number or one for each of the {num_heads} heads")
    if spans is not None and spans.shape not in ((num_heads,), q_BHTK.shape[:3]):
        raise UserError(
            f"spans must be one for every head, [{num_heads}], not {list(spans.shape)}; "
            f"or one for every query, {list(q_BHTK.shape[:3])}"
        )
    if position_keys is not None and position_keys.shape[-2] < max(windows_H):
        raise UserError(
            f"a window of {max(windows_H)} needs as many position_keys, not {position_keys.shape[-2]}"
        )
    if past is not None and past[0].shape != past[1].shape:
        raise UserError("past must be keys and values of the same shape, [B, H, M, K]")
    if filled is not None and not sees_itself:
        raise UserError("filled needs sees_itself=True: the first query of a text must see something")


def _filled(like_BHTK: Tensor, past: tuple[Tensor, Tensor] | None) -> Tensor:
    """All of the past belongs to the text."""
    rows = 0 if past is None else past[0].shape[2]
    return torch.full(like_BHTK.shape[:1], rows, device=like_BHTK.device)
