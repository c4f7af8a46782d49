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

from longspan.kernels.span_attention.mask import EPSILON, soft_mask

CHUNK = 64


def span_attention(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    *,
    window: int,
    position_keys_LK: Tensor | None = None,
    spans_H: Tensor | None = None,
    ramp: int = 1,
    first_distance: int = 1,
    dropout: float = 0.0,
) -> Tensor:
    """As described in the package's docstring, [B, H, T, K]; the last T keys belong to the block of queries.

    Row i of `position_keys_LK` belongs to distance `first_distance + i`. `spans_H` are in tokens and get
    a gradient. `dropout` acts on the weights and is off at 0.
    """
    batch, heads, block, width = q_BHTK.shape
    mask_HW = None
    if spans_H is not None:
        mask_HW = soft_mask(spans_H, ramp, window).flip(1)
    p_WK = None
    if position_keys_LK is not None:
        p_WK = position_keys_LK[:window].flip(0).to(q_BHTK.dtype)
    with torch.autocast(q_BHTK.device.type, enabled=False):
        out_NTK: Tensor = _SpanAttention.apply(  # type: ignore[no-untyped-call]
            q_BHTK.reshape(batch * heads, block, width) / math.sqrt(width),
            _band(k_BHSK, window, block, first_distance),
            _band(v_BHSK, window, block, first_distance),
            p_WK,
            mask_HW,
            dropout,
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
        (table_NCG.shape[0], rows, columns - rows),
        (rows * columns, columns + 1, 1),
        table_NCG.storage_offset(),
    )


def _key_layout_zeros(table_NCW: Tensor, dtype: torch.dtype) -> Tensor:
    """A table in key layout for one in distance layout, all zeros: a query looks at W of its G keys."""
    count, rows, window = table_NCW.shape
    return torch.zeros(count, rows, window + rows, dtype=dtype, device=table_NCW.device)


class _SpanAttention(torch.autograd.Function):
    """q is scaled already; k and v are bands; p and the mask are oldest first.

    The weights are kept as a m, before the division by `total` = <a, m> + e, which is done on the output:
    with o = (a m) v / total, the gradient of a m is (do . v - do . o) / total.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_NTK: Tensor,
        k_NSK: Tensor,
        v_NSK: Tensor,
        p_WK: Tensor | None,
        mask_HW: Tensor | None,
        dropout: float,
    ) -> Tensor:
        out, saved = [], []
        for chunk in _chunks(q_NTK, k_NSK):
            a_NCW = _softmax(q_NTK[:, chunk.queries], k_NSK[:, chunk.keys], p_WK)
            kept_NCW = torch.rand_like(a_NCW).ge_(dropout).div_(1 - dropout) if dropout > 0 else None
            used_NCG = _key_layout_zeros(a_NCW, q_NTK.dtype)
            _masked(a_NCW, mask_HW, kept_NCW, into=_by_distance(used_NCG))
            out_NCK = torch.bmm(used_NCG, v_NSK[:, chunk.keys])
            total_NC1 = None
            if mask_HW is not None:
                total_NC1 = (
                    (_heads(a_NCW, mask_HW) @ mask_HW[:, :, None].to(a_NCW.dtype)).flatten(0, 1).add_(EPSILON)
                )
                out_NCK = out_NCK.div_(total_NC1)
            out.append(out_NCK)
            saved += [a_NCW, used_NCG, total_NC1, kept_NCW]
        out_NTK = torch.cat(out, dim=1)
        ctx.save_for_backward(q_NTK, k_NSK, v_NSK, p_WK, mask_HW, out_NTK, *saved)
        return out_NTK

    @staticmethod
    def backward(ctx: Any, dout_NTK: Tensor) -> tuple[Tensor | None, ...]:
        q_NTK, k_NSK, v_NSK, p_WK, mask_HW, out_NTK, *saved = ctx.saved_tensors
        exact = torch.promote_types(q_NTK.dtype, torch.float32)  # chunks overlap: sums want full precision
        dk_NSK, dv_NSK = torch.zeros_like(k_NSK, dtype=exact), torch.zeros_like(v_NSK, dtype=exact)
        dp_WK = None if p_WK is None else torch.zeros_like(p_WK, dtype=exact)
        dmask_HW = None if mask_HW is None else torch.zeros_like(mask_HW)
        inner_NT1 = (dout_NTK * out_NTK).sum(-1, keepdim=True, dtype=exact)
        dq = []
        for number, chunk in enumerate(_chunks(q_NTK, k_NSK)):
            a_NCW, used_NCG, total_NC1, kept_NCW = saved[4 * number : 4 * number + 4]
            q_NCK, k_NGK, v_NGK = q_NTK[:, chunk.queries], k_NSK[:, chunk.keys], v_NSK[:, chunk.keys]
            dout_NCK, inner_NC1 = dout_NTK[:, chunk.queries], inner_NT1[:, chunk.queries]
            if total_NC1 is not None:
                dout_NCK, inner_NC1 = (dout_NCK / total_NC1).to(q_NTK.dtype), inner_NC1 / total_NC1

            dv_NSK[:, chunk.keys] += torch.bmm(used_NCG.mT, dout_NCK)
            ds_NCW = _by_distance(torch.bmm(dout_NCK, v_NGK.mT)).to(exact)
            if kept_NCW is not None:
                ds_NCW = ds_NCW * kept_NCW
            ds_NCW = (ds_NCW - inner_NC1).mul_(a_NCW)
            if mask_HW is not None and dmask_HW is not None:
                ds_BHCW = _heads(ds_NCW, mask_HW)
                dmask_HW += ds_BHCW.sum((0, 2))
                ds_BHCW.mul_(mask_HW[:, None])
                # What the softmax takes back, <da, a>, cancels to this; outside the span it is all there is.
                ds_NCW.addcmul_(a_NCW, inner_NC1, value=-EPSILON)

            ds_NCG = _key_layout_zeros(ds_NCW, q_NTK.dtype)
            _by_distance(ds_NCG).copy_(ds_NCW)
            dk_NSK[:, chunk.keys] += torch.bmm(ds_NCG.mT, q_NCK)
            dq_NCK = torch.bmm(ds_NCG, k_NGK)
            if p_WK is not None:
                ds_NCW = ds_NCW.to(q_NTK.dtype)
                dq_NCK += ds_NCW @ p_WK
                dp_WK += ds_NCW.flatten(0, 1).mT @ q_NCK.flatten(0, 1)
            dq.append(dq_NCK)
        dk_NSK, dv_NSK = dk_NSK.to(k_NSK.dtype), dv_NSK.to(v_NSK.dtype)
        if dp_WK is not None:
            dp_WK = dp_WK.to(p_WK.dtype)
        return torch.cat(dq, dim=1), dk_NSK, dv_NSK, dp_WK, dmask_HW, None


def _softmax(q_NCK: Tensor, k_NGK: Tensor, p_WK: Tensor | None) -> Tensor:
    content_NCW = _by_distance(torch.bmm(q_NCK, k_NGK.mT))
    scores_NCW = content_NCW if p_WK is None else (q_NCK @ p_WK.mT).add_(content_NCW)
    return torch.softmax(scores_NCW, dim=-1, dtype=torch.promote_types(q_NCK.dtype, torch.float32))


def _masked(a_NCW: Tensor, mask_HW: Tensor | None, kept_NCW: Tensor | None, *, into: Tensor) -> None:
    """a times what the mask and dropout leave of it."""
    if kept_NCW is not None:
        a_NCW = a_NCW * kept_NCW
    if mask_HW is None:
        into.copy_(a_NCW)
    else:
        torch.mul(_heads(a_NCW, mask_HW), mask_HW[:, None], out=_heads(into, mask_HW))


def _heads(x_NCW: Tensor, mask_HW: Tensor) -> Tensor:
    return torch.unflatten(x_NCW, 0, (-1, mask_HW.shape[0]))
