"""Span attention in plain torch: a band of the score table, a chunk of queries at a time.

A chunk of C queries sees W + C - 1 keys between them, so its scores are one small matrix product. They
come out in *key layout*, one column per key. Softmax and mask want *distance layout*, one column per
distance, oldest first. Row r of the one is row r of the other moved by r, so distance layout is a view
of key layout whose rows are one element longer: no data moves.

A chunk's scores stay in the processor's cache through all the passes over them, and nothing of size
T x S is ever made. The backward pass is written out, since autograd would store every intermediate
and could not accumulate into slices.

Shapes: as in the package, and N = B x H, C queries of a chunk, G = W + C keys of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.kernels.span_attention.mask import soft_mask

CHUNK = 64


@torch.compiler.disable(reason="the chunks write into slices, which compilers cannot see through")
def span_attention(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    *,
    window: int,
    position_keys_LK: Tensor | None,
    spans_H: Tensor | None,
    ramp: int,
    first_distance: int,
    dropout: float,
    epsilon: float,
) -> Tensor:
    batch, heads, block, width = q_BHTK.shape
    mask_HW = None
    if spans_H is not None:
        mask_HW = soft_mask(spans_H, ramp, window).flip(1)
    p_WK = None
    if position_keys_LK is not None:
        p_WK = position_keys_LK[:window].flip(0).to(q_BHTK.dtype)
    with torch.autocast(q_BHTK.device.type, enabled=False):
        out_NTK = _SpanAttention.apply(
            q_BHTK.reshape(batch * heads, block, width) / math.sqrt(width),
            _band(k_BHSK, window, block, first_distance),
            _band(v_BHSK, window, block, first_distance),
            p_WK,
            mask_HW,
            dropout,
            epsilon,
        )
    return out_NTK.view(batch, heads, block, width)


def _band(x_BHSK: Tensor, window: int, block: int, first_distance: int) -> Tensor:
    """The window + block rows that the queries can see, [N, W + T, K]: query t sees rows t to t + W - 1.

    Zeros stand in for what lies before the first key.
    """
    x_NSK = x_BHSK.flatten(0, 1)
    missing = window + block - x_NSK.shape[1]
    if first_distance == 0:  # the last key is seen too: move the band one row on
        x_NSK = F.pad(x_NSK, (0, 0, 0, 1))
        missing -= 1
    if missing > 0:
        return F.pad(x_NSK, (0, 0, missing, 0))
    return x_NSK[:, -missing:]


class _Chunk(NamedTuple):
    queries: slice
    keys: slice


def _chunks(q_NTK: Tensor, k_NSK: Tensor) -> Iterator[_Chunk]:
    block = q_NTK.shape[1]
    window = k_NSK.shape[1] - block
    for start in range(0, block, CHUNK):
        stop = min(start + CHUNK, block)
        yield _Chunk(slice(start, stop), slice(start, stop + window))


def _by_distance(table_NCG: Tensor) -> Tensor:
    """The view of a contiguous table in key layout that has one column per distance, oldest first."""
    rows, columns = table_NCG.shape[1:]
    return table_NCG.as_strided(
        (table_NCG.shape[0], rows, columns - rows), (rows * columns, columns + 1, 1), table_NCG.storage_offset()
    )


def _by_key(table_NCW: Tensor, dtype: torch.dtype) -> Tensor:
    """A table in distance layout moved to key layout, zeros where a query does not look."""
    count, rows, window = table_NCW.shape
    table_NCG = torch.zeros(count, rows, window + rows, dtype=dtype, device=table_NCW.device)
    _by_distance(table_NCG).copy_(table_NCW)
    return table_NCG


class _SpanAttention(torch.autograd.Function):
    """q is scaled already; k and v are bands; p and the mask are oldest first."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NTK: Tensor,
        k_NSK: Tensor,
        v_NSK: Tensor,
        p_WK: Tensor | None,
        mask_HW: Tensor | None,
        dropout: float,
        epsilon: float,
    ) -> Tensor:
        out, saved = [], []
        for chunk in _chunks(q_NTK, k_NSK):
            a_NCW = _softmax(q_NTK[:, chunk.queries], k_NSK[:, chunk.keys], p_WK)
            w_NCW, total_NC = _mask(a_NCW, mask_HW, epsilon)
            kept_NCW = None
            if dropout > 0:
                kept_NCW = torch.empty_like(w_NCW).bernoulli_(1 - dropout).div_(1 - dropout)
                w_NCW = w_NCW * kept_NCW
            w_NCG = _by_key(w_NCW, q_NTK.dtype)
            out.append(torch.bmm(w_NCG, v_NSK[:, chunk.keys]))
            saved += [a_NCW, w_NCG, total_NC, kept_NCW]
        ctx.epsilon = epsilon
        ctx.save_for_backward(q_NTK, k_NSK, v_NSK, p_WK, mask_HW, *saved)
        return torch.cat(out, dim=1)

    @staticmethod
    def backward(ctx: Any, dout_NTK: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_NTK, k_NSK, v_NSK, p_WK, mask_HW, *saved = ctx.saved_tensors
        exact = torch.promote_types(q_NTK.dtype, torch.float32)  # chunks overlap: sums want full precision
        dk_NSK, dv_NSK = torch.zeros_like(k_NSK, dtype=exact), torch.zeros_like(v_NSK, dtype=exact)
        dp_WK = None if p_WK is None else torch.zeros_like(p_WK, dtype=exact)
        dmask_HW = None if mask_HW is None else torch.zeros_like(mask_HW)
        dq = []
        for number, chunk in enumerate(_chunks(q_NTK, k_NSK)):
            a_NCW, w_NCG, total_NC, kept_NCW = saved[4 * number : 4 * number + 4]
            q_NCK, dout_NCK = q_NTK[:, chunk.queries], dout_NTK[:, chunk.queries].contiguous()
            k_NGK, v_NGK = k_NSK[:, chunk.keys], v_NSK[:, chunk.keys]

            dv_NSK[:, chunk.keys] += torch.bmm(w_NCG.mT, dout_NCK)
            dw_NCG = torch.bmm(dout_NCK, v_NGK.mT)
            # The dropped weights are zero in w, so <dw, w> needs no second look at what was kept.
            inner_NC1 = (dw_NCG * w_NCG).sum(-1, keepdim=True, dtype=exact)
            dw_NCW = _by_distance(dw_NCG).to(exact)
            if kept_NCW is not None:
                dw_NCW = dw_NCW * kept_NCW
            ds_NCW, dmask_part = _scores_gradient(dw_NCW, inner_NC1, a_NCW, total_NC, mask_HW, ctx.epsilon)
            if dmask_HW is not None:
                dmask_HW += dmask_part

            ds_NCG = _by_key(ds_NCW, q_NTK.dtype)
            dk_NSK[:, chunk.keys] += torch.bmm(ds_NCG.mT, q_NCK)
            dq_NCK = torch.bmm(ds_NCG, k_NGK)
            if p_WK is not None:
                ds_NCW = ds_NCW.to(q_NTK.dtype)
                dq_NCK += ds_NCW @ p_WK
                dp_WK += ds_NCW.flatten(0, 1).mT @ q_NCK.flatten(0, 1)
            dq.append(dq_NCK)
        dk_NSK, dv_NSK = dk_NSK.to(k_NSK.dtype), dv_NSK.to(v_NSK.dtype)
        if p_WK is not None:
            dp_WK = dp_WK.to(p_WK.dtype)
        return torch.cat(dq, dim=1), dk_NSK, dv_NSK, dp_WK, dmask_HW, None, None


def _softmax(q_NCK: Tensor, k_NGK: Tensor, p_WK: Tensor | None) -> Tensor:
    content_NCW = _by_distance(torch.bmm(q_NCK, k_NGK.mT))
    scores_NCW = content_NCW if p_WK is None else (q_NCK @ p_WK.mT).add_(content_NCW)
    return torch.softmax(scores_NCW, dim=-1, dtype=torch.promote_types(q_NCK.dtype, torch.float32))


def _mask(a_NCW: Tensor, mask_HW: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor | None]:
    """The weights after mask and renormalisation, and what they were divided by."""
    if mask_HW is None:
        return a_NCW, None
    w_NCW = _times_mask(a_NCW, mask_HW)
    total_NC = w_NCW.sum(-1).add_(epsilon)
    return w_NCW.div_(total_NC[..., None]), total_NC


def _times_mask(x_NCW: Tensor, mask_HW: Tensor) -> Tensor:
    x_BHCW = x_NCW.unflatten(0, (-1, mask_HW.shape[0]))
    return (x_BHCW * mask_HW[:, None].to(x_NCW.dtype)).flatten(0, 1)


def _scores_gradient(
    dw_NCW: Tensor,
    inner_NC1: Tensor,
    a_NCW: Tensor,
    total_NC: Tensor | None,
    mask_HW: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor | None]:
    """Back through renormalisation, mask and softmax: gradients of the scores and of the mask.

    With `inner` = <dw, w> and e the epsilon, w = a m / (sum + e) gives d(a m) = (dw - inner) / (sum + e).
    The softmax then wants <da, a> = inner e / (sum + e): written so, since the sum it stands for cancels
    to almost nothing.
    """
    if mask_HW is None or total_NC is None:
        return (dw_NCW - inner_NC1).mul_(a_NCW), None
    total_NC1 = total_NC[..., None]
    dmasked_NCW = (dw_NCW - inner_NC1).mul_(a_NCW).div_(total_NC1)  # times a, which both results need
    dmask_HW = dmasked_NCW.unflatten(0, (-1, mask_HW.shape[0])).sum((0, 2))
    ds_NCW = _times_mask(dmasked_NCW, mask_HW)
    return ds_NCW.addcmul_(a_NCW, inner_NC1 * (epsilon / total_NC1), value=-1), dmask_HW.to(mask_HW.dtype)
