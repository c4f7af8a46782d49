"""Span attention in plain torch: a band of the score table, a chunk of queries at a time.

A chunk of C queries sees W + C - 1 keys between them, so its scores are one small matrix product. They
come out in *key layout*, one column per key. Softmax and mask want *distance layout*, one column per
distance, oldest first. Row r of the one is row r of the other moved by r, so distance layout is a view
of key layout whose rows are one element longer: no data moves.

A chunk's scores stay in the processor's cache through all the passes over them, and nothing of size
T x S is ever made. The backward pass is written out, since autograd would store every intermediate
and could not accumulate into slices.

Shapes: as in the package, and N = B x H, C queries of a chunk, G = W + C keys of a chunk, X = W + P.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.kernels.span_attention.mask import EPSILON, soft_mask
from longspan.kernels.span_attention.queries import biased, position_queries

CHUNK = 64


def span_attention(
    q_BHTK: Tensor,
    k_BHSK: Tensor,
    v_BHSK: Tensor,
    *,
    window: int,
    position_keys: Tensor | None = None,
    content_bias_HK: Tensor | None = None,
    position_bias_HK: Tensor | None = None,
    position_map_HKE: Tensor | None = None,
    filled_B: Tensor | None = None,
    slots: tuple[Tensor, Tensor] | None = None,
    spans_H: Tensor | None = None,
    ramp: int = 1,
    renormalise: bool = True,
    first_distance: int = 1,
    dropout: float = 0.0,
) -> Tensor:
    """As described in the package's docstring, [B, H, T, K]; the last T keys belong to the block of queries.

    Row i of `position_keys`, [L, K] or [H, L, K], belongs to distance `first_distance + i`; with a map of
    every head they are e_d, [L, E]. `filled_B` says how many of the last keys before the block are there; it
    needs `first_distance` 0, so that every query sees at least itself.
    `slots` are keys and values, each [H, P, K]. `spans_H` are in tokens and get a gradient; `renormalise`
    is about them only. `dropout` acts on the weights and is off at 0.
    """
    if filled_B is not None and first_distance != 0:
        raise ValueError("with filled_B a query must see itself: first_distance must be 0")
    batch, heads, block, width = q_BHTK.shape
    scale = 1 / math.sqrt(width)
    slot_k_HPK, slot_v_HPK = (None, None) if slots is None else (x.to(q_BHTK.dtype) for x in slots)
    mask_HX = None
    if spans_H is not None:
        mask_HX = soft_mask(spans_H, ramp, window).flip(1)
        if slot_k_HPK is not None:
            mask_HX = F.pad(mask_HX, (0, slot_k_HPK.shape[1]), value=1.0)
    p_WK = None
    if position_keys is not None:
        p_WK = position_keys[..., :window, :].flip(-2).to(q_BHTK.dtype)
    position_q_NTK = None
    if any(x is not None for x in (content_bias_HK, position_bias_HK, position_map_HKE)):
        position_q = position_queries(q_BHTK, position_bias_HK, position_map_HKE)
        position_q_NTK = position_q.flatten(0, 1) * scale
    with torch.autocast(q_BHTK.device.type, enabled=False):
        out_NTK: Tensor = _SpanAttention.apply(  # type: ignore[no-untyped-call]
            biased(q_BHTK, content_bias_HK).reshape(batch * heads, block, width) * scale,
            _band(k_BHSK, window, block, first_distance),
            _band(v_BHSK, window, block, first_distance),
            position_q_NTK,
            p_WK,
            slot_k_HPK,
            slot_v_HPK,
            mask_HX,
            filled_B,
            renormalise,
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


def _unseen(filled_B: Tensor | None, queries: slice, window: int) -> Tensor | None:
    """Which distances, oldest first, reach back before the text of a row began: [B, C, W]."""
    if filled_B is None:
        return None
    query_C = torch.arange(queries.start, queries.stop, device=filled_B.device)
    distance_W = torch.arange(window - 1, -1, -1, device=filled_B.device)
    return distance_W > (filled_B[:, None] + query_C)[..., None]


def _by_distance(table_NCG: Tensor) -> Tensor:
    """The view of a contiguous table in key layout that has one column per distance, oldest first."""
    rows, columns = table_NCG.shape[1:]
    return table_NCG.as_strided(
        (table_NCG.shape[0], rows, columns - rows),
        (rows * columns, columns + 1, 1),
        table_NCG.storage_offset(),
    )


def _key_layout_zeros(q_NCK: Tensor, window: int) -> Tensor:
    """A table in key layout, [N, C, G], all zeros: of its G keys a query looks at W."""
    count, rows = q_NCK.shape[:2]
    return q_NCK.new_zeros(count, rows, window + rows)


class _SpanAttention(torch.autograd.Function):
    """q and the queries of positions are scaled already; k and v are bands; p, [W, K] or [H, W, K], and the
    mask are oldest first, and slots come last.

    The weights are kept as a m, before the division by `total` = <a, m> + e, which is done on the output:
    with o = (a m) v / total, the gradient of a m is (do . v - do . o) / total. Not renormalised it is do . v.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_NTK: Tensor,
        k_NSK: Tensor,
        v_NSK: Tensor,
        position_q_NTK: Tensor | None,
        p_WK: Tensor | None,
        slot_k_HPK: Tensor | None,
        slot_v_HPK: Tensor | None,
        mask_HX: Tensor | None,
        filled_B: Tensor | None,
        renormalise: bool,
        dropout: float,
    ) -> Tensor:
        window = k_NSK.shape[1] - q_NTK.shape[1]
        out, saved = [], []
        for chunk in _chunks(q_NTK, k_NSK):
            a_NCX = _softmax(
                q_NTK[:, chunk.queries],
                k_NSK[:, chunk.keys],
                (q_NTK if position_q_NTK is None else position_q_NTK)[:, chunk.queries],
                p_WK,
                slot_k_HPK,
                _unseen(filled_B, chunk.queries, window),
            )
            kept_NCX = torch.rand_like(a_NCX).ge_(dropout).div_(1 - dropout) if dropout > 0 else None
            used_NCX = a_NCX if kept_NCX is None else a_NCX * kept_NCX
            used_NCG = _key_layout_zeros(q_NTK[:, chunk.queries], window)
            _times_mask(used_NCX[..., :window], mask_HX, into=_by_distance(used_NCG))
            out_NCK = torch.bmm(used_NCG, v_NSK[:, chunk.keys])
            if slot_v_HPK is not None:
                out_NCK += _per_head(used_NCX[..., window:].to(q_NTK.dtype), slot_v_HPK)
            total_NC1 = None
            if mask_HX is not None and renormalise:
                total_NC1 = _per_head(a_NCX, mask_HX[:, :, None].to(a_NCX.dtype)).add_(EPSILON)
                out_NCK = out_NCK.div_(total_NC1)
            out.append(out_NCK)
            saved += [a_NCX, used_NCG, total_NC1, kept_NCX]
        out_NTK = torch.cat(out, dim=1)
        inputs = (q_NTK, k_NSK, v_NSK, position_q_NTK, p_WK, slot_k_HPK, slot_v_HPK, mask_HX)
        ctx.save_for_backward(*inputs, out_NTK, *saved)
        return out_NTK

    @staticmethod
    def backward(ctx: Any, dout_NTK: Tensor) -> tuple[Tensor | None, ...]:
        q_NTK, k_NSK, v_NSK, position_q_NTK, p_WK, slot_k_HPK, slot_v_HPK, mask_HX, out_NTK, *saved = (
            ctx.saved_tensors
        )
        window = k_NSK.shape[1] - q_NTK.shape[1]
        exact = torch.promote_types(q_NTK.dtype, torch.float32)  # chunks overlap: sums want full precision
        inputs = (k_NSK, v_NSK, p_WK, slot_k_HPK, slot_v_HPK, mask_HX)
        sums: list[Any] = [None if x is None else torch.zeros_like(x, dtype=exact) for x in inputs]
        dk_NSK, dv_NSK, dp_WK, dslot_k_HPK, dslot_v_HPK, dmask_HX = sums
        inner_NT1 = (dout_NTK * out_NTK).sum(-1, keepdim=True, dtype=exact)
        dq, dposition_q = [], []
        for number, chunk in enumerate(_chunks(q_NTK, k_NSK)):
            a_NCX, used_NCG, total_NC1, kept_NCX = saved[4 * number : 4 * number + 4]
            q_NCK, k_NGK, v_NGK = q_NTK[:, chunk.queries], k_NSK[:, chunk.keys], v_NSK[:, chunk.keys]
            dout_NCK, inner_NC1 = dout_NTK[:, chunk.queries], inner_NT1[:, chunk.queries]
            if total_NC1 is not None:
                dout_NCK, inner_NC1 = (dout_NCK / total_NC1).to(q_NTK.dtype), inner_NC1 / total_NC1

            dv_NSK[:, chunk.keys] += torch.bmm(used_NCG.mT, dout_NCK)
            ds_NCX = _by_distance(torch.bmm(dout_NCK, v_NGK.mT)).to(exact)
            if slot_v_HPK is not None:
                used_NCP = (a_NCX if kept_NCX is None else a_NCX * kept_NCX)[..., window:].to(q_NTK.dtype)
                dslot_v_HPK += _sum_per_head(used_NCP, dout_NCK, slot_v_HPK)
                ds_NCX = torch.cat([ds_NCX, _per_head(dout_NCK, slot_v_HPK.mT).to(exact)], dim=-1)
            if kept_NCX is not None:
                ds_NCX = ds_NCX * kept_NCX
            if total_NC1 is None:
                if mask_HX is not None:
                    dmask_HX += _heads(ds_NCX * a_NCX, mask_HX).sum((0, 2))
                    ds_NCX = (_heads(ds_NCX, mask_HX) * mask_HX[:, None]).flatten(0, 1)
                # This is do . o too, but rounded alike: the gradients of a query's scores then sum to zero.
                inner_NC1 = (ds_NCX * a_NCX).sum(-1, keepdim=True)
            ds_NCX = (ds_NCX - inner_NC1).mul_(a_NCX)
            if total_NC1 is not None:
                ds_BHCX = _heads(ds_NCX, mask_HX)
                dmask_HX += ds_BHCX.sum((0, 2))
                ds_BHCX.mul_(mask_HX[:, None])
                # What the softmax takes back, <da, a>, cancels to this; outside the span it is all there is.
                ds_NCX.addcmul_(a_NCX, inner_NC1, value=-EPSILON)

            ds_NCX = ds_NCX.to(q_NTK.dtype)
            ds_NCW = ds_NCX[..., :window]
            ds_NCG = _key_layout_zeros(q_NCK, window)
            _by_distance(ds_NCG).copy_(ds_NCW)
            dk_NSK[:, chunk.keys] += torch.bmm(ds_NCG.mT, q_NCK)
            dq_NCK = torch.bmm(ds_NCG, k_NGK)
            if p_WK is not None:
                if position_q_NTK is None:
                    dq_NCK += _times_positions(ds_NCW, p_WK)
                    dp_WK += _sum_over_queries(ds_NCW, q_NCK, p_WK)
                else:
                    dposition_q.append(_times_positions(ds_NCW, p_WK))
                    dp_WK += _sum_over_queries(ds_NCW, position_q_NTK[:, chunk.queries], p_WK)
            if slot_k_HPK is not None:
                dq_NCK += _per_head(ds_NCX[..., window:], slot_k_HPK)
                dslot_k_HPK += _sum_per_head(ds_NCX[..., window:], q_NCK, slot_k_HPK)
            dq.append(dq_NCK)
        dk, dv, *others = [
            None if x is None else total.to(x.dtype) for x, total in zip(inputs, sums, strict=True)
        ]
        dposition_q_NTK = torch.cat(dposition_q, dim=1) if dposition_q else None
        return torch.cat(dq, dim=1), dk, dv, dposition_q_NTK, *others, None, None, None


def _softmax(
    q_NCK: Tensor,
    k_NGK: Tensor,
    position_q_NCK: Tensor,
    p_WK: Tensor | None,
    slot_k_HPK: Tensor | None,
    unseen_BCW: Tensor | None,
) -> Tensor:
    """Over the distances of the window, oldest first, and then the slots."""
    scores = _by_distance(torch.bmm(q_NCK, k_NGK.mT))
    if p_WK is not None:
        scores = _times_positions(position_q_NCK, p_WK.mT).add_(scores)
    if unseen_BCW is not None:
        scores.unflatten(0, (unseen_BCW.shape[0], -1)).masked_fill_(unseen_BCW[:, None], -math.inf)
    if slot_k_HPK is not None:
        scores = torch.cat([scores, _per_head(q_NCK, slot_k_HPK.mT)], dim=-1)
    return torch.softmax(scores, dim=-1, dtype=torch.promote_types(q_NCK.dtype, torch.float32))


def _times_mask(a_NCW: Tensor, mask_HX: Tensor | None, *, into: Tensor) -> None:
    if mask_HX is None:
        into.copy_(a_NCW)
    else:
        mask_H1W = mask_HX[:, None, : a_NCW.shape[-1]]
        torch.mul(_heads(a_NCW, mask_HX), mask_H1W, out=_heads(into, mask_HX))


def _times_positions(x_NCX: Tensor, p: Tensor) -> Tensor:
    """Rows times the position keys, the same for all heads or each head's own."""
    return x_NCX @ p if p.dim() == 2 else _per_head(x_NCX, p)


def _sum_over_queries(x_NCW: Tensor, y_NCK: Tensor, p: Tensor) -> Tensor:
    """The sum over batch and queries of x times y, in the shape of the position keys."""
    if p.dim() == 2:
        return x_NCW.flatten(0, 1).mT @ y_NCK.flatten(0, 1)
    return _sum_per_head(x_NCW, y_NCK, p)


def _heads(x_NCX: Tensor, per_head: Tensor) -> Tensor:
    """[N, ...] as [B, H, ...], for as many heads as `per_head` has."""
    return torch.unflatten(x_NCX, 0, (-1, per_head.shape[0]))


def _per_head(x_NCX: Tensor, matrices_HXY: Tensor) -> Tensor:
    """Every head's rows times that head's matrix."""
    return (_heads(x_NCX, matrices_HXY) @ matrices_HXY).flatten(0, 1)


def _sum_per_head(x_NCP: Tensor, y_NCK: Tensor, slots_HPK: Tensor) -> Tensor:
    """For every head the sum over batch and queries of x times y, [H, P, K]."""
    x_HBCP, y_HBCK = (_heads(x, slots_HPK).transpose(0, 1).flatten(1, 2) for x in (x_NCP, y_NCK))
    return torch.bmm(x_HBCP.mT, y_HBCK)
