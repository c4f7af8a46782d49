"""Span attention in plain torch: a band of the score table, a chunk of queries at a time.

A chunk of C queries sees W + C - 1 keys between them, so its scores are one small matrix product. They
come out in *key layout*, one column per key. Softmax and mask use *distance layout*, one column per
distance, oldest first. Row r is shifted by r between the layouts, so distance layout is a view
of key layout whose rows are one element longer: no data moves.

A chunk's scores stay in the CPU's cache through all the passes over them, and nothing of size
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

from longspan.kernels.span_attention.context import EPSILON, AttentionContext, soft_mask

CHUNK = 64


def span_attention(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, context: AttentionContext) -> Tensor:
    """As described in the package's docstring, [B, H, T, K]; a group has the longest window of its heads."""
    # One split: a slice for every group would add up a gradient of the whole tensor for each.
    splits = (x_BHTK.split(context.group_sizes, dim=1) for x_BHTK in (q_BHTK, k_BHTK, v_BHTK))
    out = []
    for (_, group), q_BGTK, k_BGTK, v_BGTK in zip(context.groups(), *splits, strict=True):
        past_k_BGMK, past_v_BGMK = group.past[0].transpose(1, 2).chunk(2, dim=1)
        k_BGSK, v_BGSK = torch.cat([past_k_BGMK, k_BGTK], dim=2), torch.cat([past_v_BGMK, v_BGTK], dim=2)
        out.append(_group(q_BGTK, k_BGSK, v_BGSK, group))
    return out[0] if len(out) == 1 else torch.cat(out, dim=1)


def _group(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, context: AttentionContext) -> Tensor:
    """Heads of one window; the last T keys belong to the block of queries."""
    batch, heads, block, width = q_BHTK.shape
    window = max(context.windows)
    persistent_k_NPK, persistent_v_NPK = (
        (None, None)
        if context.persistent is None
        else (_of_every_row(x_HPK, q_BHTK) for x_HPK in context.persistent)
    )
    mask = None
    if context.spans is not None:
        mask = soft_mask(context.spans, context.ramp, window).flip(-1)
        mask = mask[:, None] if mask.dim() == 2 else mask
        if persistent_k_NPK is not None:
            mask = F.pad(mask, (0, persistent_k_NPK.shape[1]), value=1.0)
    p_NWK = position_q_BHTK = None
    if context.position_keys is not None:
        p_NWK = _of_every_row(context.position_keys[..., :window, :].flip(-2), q_BHTK)
        others = (context.content_bias_HK, context.position_bias_HK, context.position_map_HKE)
        if any(x is not None for x in others):
            position_q_BHTK = context.position_queries(q_BHTK)
    with torch.autocast(q_BHTK.device.type, enabled=False):
        out_NTK: Tensor = _SpanAttention.apply(  # type: ignore[no-untyped-call]
            context.content_queries(q_BHTK),
            *(_band(x_BHSK, window, block, context.first_distance) for x_BHSK in (k_BHSK, v_BHSK)),
            position_q_BHTK, p_NWK, persistent_k_NPK, persistent_v_NPK, mask, context.filled_B,
            1 / math.sqrt(width), context.renormalise, context.dropout,
        )  # fmt: skip
    return out_NTK.view(batch, heads, block, width)


def _of_every_row(x: Tensor, q_BHTK: Tensor) -> Tensor:
    """A tensor of all heads, [X, K], or of each head, [H, X, K], as [N, X, K]."""
    batch, heads = q_BHTK.shape[:2]
    x = x.to(q_BHTK.dtype)
    return x.expand(batch * heads, -1, -1) if x.dim() == 2 else x.expand(batch, -1, -1, -1).flatten(0, 1)


def _band(x_BHSK: Tensor, window: int, block: int, first_distance: int) -> Tensor:
    """The window + block rows that the queries can see, [N, W + T, K]: query t sees rows t to t + W - 1.

    Rows before the first key are zeros.
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
    """Which distances, oldest first, are before the beginning of the text: [B, C, W]."""
    if filled_B is None:
        return None
    query_C = torch.arange(queries.start, queries.stop, device=filled_B.device)
    distance_W = torch.arange(window - 1, -1, -1, device=filled_B.device)
    return distance_W > (filled_B[:, None] + query_C)[..., None]


def _by_distance(table_NCG: Tensor) -> Tensor:
    """The view in distance layout, [N, C, W], of a contiguous table in key layout."""
    rows, columns = table_NCG.shape[1:]
    return table_NCG.as_strided(
        (table_NCG.shape[0], rows, columns - rows),
        (rows * columns, columns + 1, 1),
        table_NCG.storage_offset(),
    )


def _table(q_NCK: Tensor, window: int, before: Tensor | None) -> Tensor:
    """A table in key layout, [N, C, G], with zeros for keys that a query does not see: it sees W of G keys.

    Only the other entries are written, so the table of the previous chunk, still in the cache, is reused.
    """
    count, rows = q_NCK.shape[:2]
    if before is not None and before.shape[1] == rows:
        return before
    return q_NCK.new_zeros(count, rows, window + rows)


class _SpanAttention(torch.autograd.Function):
    """k and v are bands; position keys and the mask are oldest first, and persistent vectors come last.

    The mask is that of every head, [H, 1, X], or of every query, [B, H, T, X].

    The weights are kept as a m, before the division by `total` = <a, m> + e, which is done on the output:
    with o = (a m) v / total, the gradient of a m is (do . v - do . o) / total. Not renormalised it is do . v.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BHTK: Tensor, k_NSK: Tensor, v_NSK: Tensor, position_q_BHTK: Tensor | None,
        p_NWK: Tensor | None, persistent_k_NPK: Tensor | None, persistent_v_NPK: Tensor | None,
        mask: Tensor | None, filled_B: Tensor | None, scale: float, renormalise: bool, dropout: float,
    ) -> Tensor:  # fmt: skip
        window = k_NSK.shape[1] - q_BHTK.shape[2]
        q_NTK = _scaled(q_BHTK, scale)
        position_q_NTK = q_NTK if position_q_BHTK is None else _scaled(position_q_BHTK, scale)
        out_NTK, saved, used_NCG = torch.empty_like(q_NTK), [], None
        for chunk in _chunks(q_NTK, k_NSK):
            a_NCX = _softmax(
                q_NTK[:, chunk.queries],
                k_NSK[:, chunk.keys],
                position_q_NTK[:, chunk.queries],
                p_NWK,
                persistent_k_NPK,
                _unseen(filled_B, chunk.queries, window),
            )
            used_NCG = _table(q_NTK[:, chunk.queries], window, used_NCG)
            mask_C = _of_queries(mask, chunk.queries)
            _put_weights(a_NCX, mask_C, None, into=used_NCG)
            a_NCP, total_NC1 = a_NCX[..., window:], None
            if mask is not None and renormalise:
                total_NC1 = used_NCG.sum(-1, keepdim=True, dtype=a_NCX.dtype).add_(EPSILON)
                if persistent_v_NPK is not None:
                    total_NC1 += a_NCP.sum(-1, keepdim=True)
            kept_NCX = None
            if dropout > 0:
                kept_NCX = torch.rand_like(a_NCX).ge_(dropout).div_(1 - dropout)
                _put_weights(a_NCX, mask_C, kept_NCX, into=used_NCG)
                a_NCP = a_NCP * kept_NCX[..., window:]
            out_NCK = torch.bmm(used_NCG, v_NSK[:, chunk.keys])
            if persistent_v_NPK is not None:
                out_NCK.baddbmm_(a_NCP.to(q_NTK.dtype), persistent_v_NPK)
            torch.div(out_NCK, 1 if total_NC1 is None else total_NC1, out=out_NTK[:, chunk.queries])
            saved += [a_NCX, total_NC1, kept_NCX]
        ctx.scale, ctx.shape, ctx.has_position_q = scale, q_BHTK.shape, position_q_BHTK is not None
        inputs = (q_NTK, k_NSK, v_NSK, position_q_NTK, p_NWK, persistent_k_NPK, persistent_v_NPK, mask)
        ctx.save_for_backward(*inputs, out_NTK, *saved)
        return out_NTK

    @staticmethod
    def backward(ctx: Any, dout_NTK: Tensor) -> tuple[Tensor | None, ...]:
        (
            q_NTK, k_NSK, v_NSK, position_q_NTK, p_NWK, persistent_k_NPK, persistent_v_NPK, mask, out_NTK,
            *saved,
        ) = ctx.saved_tensors  # fmt: skip
        window = k_NSK.shape[1] - q_NTK.shape[1]
        exact = torch.promote_types(q_NTK.dtype, torch.float32)  # chunks overlap: sums need full precision
        learned_NWK = p_NWK if ctx.needs_input_grad[4] else None  # sinusoids are not
        inputs = (k_NSK, v_NSK, learned_NWK, persistent_k_NPK, persistent_v_NPK, mask)
        sums: list[Any] = [None if x is None else x.new_zeros(x.shape, dtype=exact) for x in inputs]
        dk_NSK, dv_NSK, dp_NWK, dpersistent_k_NPK, dpersistent_v_NPK, dmask = sums
        dq_NTK, table_NCG = torch.empty_like(q_NTK), None
        dposition_q_NTK = torch.empty_like(position_q_NTK) if ctx.has_position_q else None
        for number, chunk in enumerate(_chunks(q_NTK, k_NSK)):
            a_NCX, total_NC1, kept_NCX = saved[3 * number : 3 * number + 3]
            q_NCK, k_NGK, v_NGK = q_NTK[:, chunk.queries], k_NSK[:, chunk.keys], v_NSK[:, chunk.keys]
            dout_NCK = dout_NTK[:, chunk.queries]
            if total_NC1 is not None:
                dout_NCK = (dout_NCK / total_NC1).to(q_NTK.dtype)
                inner_NC1 = (dout_NCK * out_NTK[:, chunk.queries]).sum(-1, keepdim=True, dtype=exact)

            table_NCG, mask_C = _table(q_NCK, window, table_NCG), _of_queries(mask, chunk.queries)
            _put_weights(a_NCX, mask_C, kept_NCX, into=table_NCG)
            dv_NSK[:, chunk.keys] += torch.bmm(table_NCG.mT, dout_NCK)
            ds_NCX = _by_distance(torch.bmm(dout_NCK, v_NGK.mT)).to(exact)
            if persistent_v_NPK is not None:
                used_NCP = (a_NCX if kept_NCX is None else a_NCX * kept_NCX)[..., window:].to(q_NTK.dtype)
                _add_product(used_NCP.mT, dout_NCK, to=dpersistent_v_NPK)
                ds_NCX = torch.cat([ds_NCX, torch.bmm(dout_NCK, persistent_v_NPK.mT).to(exact)], dim=-1)
            if kept_NCX is not None:
                ds_NCX = ds_NCX * kept_NCX
            if total_NC1 is None:
                if mask_C is not None:
                    _add_mask_gradient(ds_NCX * a_NCX, _of_queries(dmask, chunk.queries))
                    ds_NCX = (_heads(ds_NCX, mask_C) * mask_C).flatten(0, 1)
                # Equal to do . o, but rounded the same way: gradients of a query's scores then sum to zero.
                inner_NC1 = (ds_NCX * a_NCX).sum(-1, keepdim=True)
            ds_NCX = (ds_NCX - inner_NC1).mul_(a_NCX)
            if total_NC1 is not None:
                _add_mask_gradient(ds_NCX, _of_queries(dmask, chunk.queries))
                _heads(ds_NCX, mask_C).mul_(mask_C)
                # The subtracted term of the softmax gradient, <da, a>, reduces to this:
                # the only term outside the span.
                ds_NCX.addcmul_(a_NCX, inner_NC1, value=-EPSILON)

            ds_NCX = ds_NCX.to(q_NTK.dtype)
            ds_NCW, ds_NCP = ds_NCX[..., :window], ds_NCX[..., window:]
            _by_distance(table_NCG).copy_(ds_NCW)
            dk_NSK[:, chunk.keys] += torch.bmm(table_NCG.mT, q_NCK)
            dq_NCK = torch.bmm(table_NCG, k_NGK)
            if p_NWK is not None:
                if dp_NWK is not None:
                    _add_product(ds_NCW.mT, position_q_NTK[:, chunk.queries], to=dp_NWK)
                if dposition_q_NTK is None:
                    dq_NCK.baddbmm_(ds_NCW, p_NWK)
                else:
                    dposition_q_NCK = torch.bmm(ds_NCW, p_NWK)
                    torch.mul(dposition_q_NCK, ctx.scale, out=dposition_q_NTK[:, chunk.queries])
            if persistent_k_NPK is not None:
                dq_NCK.baddbmm_(ds_NCP, persistent_k_NPK)
                _add_product(ds_NCP.mT, q_NCK, to=dpersistent_k_NPK)
            torch.mul(dq_NCK, ctx.scale, out=dq_NTK[:, chunk.queries])
        dk, dv, *others = [
            None if x is None else total.to(x.dtype) for x, total in zip(inputs, sums, strict=True)
        ]
        batch_heads = ctx.shape[:2]
        dposition_q = None if dposition_q_NTK is None else dposition_q_NTK.unflatten(0, batch_heads)
        return dq_NTK.unflatten(0, batch_heads), dk, dv, dposition_q, *others, None, None, None, None


def _scaled(q_BHTK: Tensor, scale: float) -> Tensor:
    """[N, T, K], contiguous, in one pass: the heads of a projection are interleaved."""
    return torch.mul(q_BHTK, scale, out=q_BHTK.new_empty(q_BHTK.shape)).flatten(0, 1)


def _softmax(
    q_NCK: Tensor, k_NGK: Tensor, position_q_NCK: Tensor, p_NWK: Tensor | None,
    persistent_k_NPK: Tensor | None, unseen_BCW: Tensor | None,
) -> Tensor:  # fmt: skip
    """Over the distances of the window, oldest first, and then the persistent vectors."""
    scores = _by_distance(torch.bmm(q_NCK, k_NGK.mT))
    if p_NWK is not None:
        scores = torch.bmm(position_q_NCK, p_NWK.mT).add_(scores)
    if unseen_BCW is not None:
        scores.unflatten(0, (unseen_BCW.shape[0], -1)).masked_fill_(unseen_BCW[:, None], -math.inf)
    if persistent_k_NPK is not None:
        scores = torch.cat([scores, torch.bmm(q_NCK, persistent_k_NPK.mT)], dim=-1)
    return torch.softmax(scores, dim=-1, dtype=torch.promote_types(q_NCK.dtype, torch.float32))


def _put_weights(a_NCX: Tensor, mask: Tensor | None, kept_NCX: Tensor | None, *, into: Tensor) -> None:
    """a m of the window's distances, or of those that dropout has kept, into the band of a table."""
    band_NCW = _by_distance(into)
    window = band_NCW.shape[-1]
    if mask is None:
        band_NCW.copy_(a_NCX[..., :window])
    else:
        torch.mul(_heads(a_NCX[..., :window], mask), mask[..., :window], out=_heads(band_NCW, mask))
    if kept_NCX is not None:
        band_NCW *= kept_NCX[..., :window]


def _heads(x_NCX: Tensor, mask: Tensor) -> Tensor:
    """[N, ...] as [B, H, ...], for as many heads as the mask has."""
    return torch.unflatten(x_NCX, 0, (-1, mask.shape[-3]))


def _of_queries(mask: Tensor | None, queries: slice) -> Any:
    """The mask of a chunk: that of every head, or of its queries."""
    return mask if mask is None or mask.dim() == 3 else mask[:, :, queries]


def _add_mask_gradient(x_NCX: Tensor, to: Tensor) -> None:
    """To the mask of every head the sum over batch and queries."""
    if to.dim() == 3:  # both dimensions at once take several times as long
        to += _heads(x_NCX.sum(1), to).sum(0)[:, None]
    else:
        to += _heads(x_NCX, to)


def _add_product(x: Tensor, y: Tensor, *, to: Tensor) -> None:
    """The product of every row and head, added to a sum that may be more precise."""
    if to.dtype == x.dtype:
        to.baddbmm_(x, y)
    else:
        to += torch.bmm(x, y)
