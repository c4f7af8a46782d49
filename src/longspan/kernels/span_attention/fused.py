"""Span attention on a GPU: the kernels of triton.py with the matrix products around them, and autograd.

Heads come in groups that remember equally far. What a group remembers is one tensor of its keys and values,
position by position; end to end they are the kernels' `PAST`. The term for the distance is a table that
matrix products make, head by head, as wide as the window of the head's group. It is kept for the backward
pass, which turns its gradient into those of queries and position keys by matrix products again. The kernels
want query t of a text to find its distances t % 8 columns further on: so a head's product is a batch of 8, of
every eighth query with position keys that begin as much later.

The kernels add the bias of the content to queries as they read them, and sum its gradient in parts. What the
table is made of, q + v, is written out. Its gradient is that of q too, less what came from the content.

Shapes: as in the package, and G heads of a group, X = 2G (the keys of G heads, then their values), C = 8
classes of queries, N = B x T / 8 queries of a class, S columns of the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from longspan.errors import UserError
from longspan.kernels.span_attention import triton as kernels
from longspan.kernels.span_attention.queries import position_queries

LARGEST_HEAD = 128

# Found by trying on an H200, in half precision and heads of 64: queries and keys of a tile, warps, stages of
# the pipeline, and where it helps the most registers of a thread: four programs share a multiprocessor then.
TILES: dict[str, tuple[int, ...]] = {
    "forward": (64, 32, 4, 3, 128),
    "queries": (64, 32, 4, 3, 128),
    "keys": (64, 64, 4, 2),
    "slots": (64, 64, 4, 3),
}

# Of what is fixed when a kernel is compiled, what matters to slots: they have no distance.
SLOT_CONSTANTS = ("WIDTH", "BK", "HAS_SPANS", "RENORMALISE", "HAS_DROPOUT", "PRECISION")


# Queries whose rows of the table are moved on by 0, 1, 2 ... columns.
CLASSES = 8

# As far beyond the table a tile may read.
MARGIN = 256


class Table(NamedTuple):
    """Where a head's distances are in the table: its first number, its rows and columns."""

    begin: int
    rows: int
    columns: int


class Layout(NamedTuple):
    """Where every head finds its past and its table: for the host, and for the device in rows of 8."""

    tables: tuple[Table, ...]
    heads: Tensor
    table_size: int
    longest_reach: int


class Options(NamedTuple):
    """What is the same for all heads."""

    ramp: int
    renormalise: bool
    first_distance: int
    dropout: float
    windows_follow_spans: bool


@cache  # for good: a recorded step knows where its tables lie
def _layout(
    windows: tuple[int, ...],
    pasts: tuple[tuple[int, int], ...],
    batch: int,
    block: int,
    device: torch.device,
) -> Layout:
    """`pasts` are (rows, heads) of every group."""
    heads, tables, head, past, begin = [], [], 0, 0, MARGIN
    rows = batch * _whole(block)
    for reach, size in pasts:
        columns = _whole(max(windows[head : head + size])) + CLASSES
        for index in range(size):
            keys, values, step = past + index, past + size + index, 2 * size
            heads.append([windows[head + index], reach, keys, values, step, batch * step, begin, columns])
            tables.append(Table(begin, rows, columns))
            begin += rows * columns
        head, past = head + size, past + batch * reach * 2 * size
    longest_reach = max(reach for reach, _ in pasts)
    return Layout(tuple(tables), torch.tensor(heads, device=device), begin + MARGIN, longest_reach)


def _whole(number: int) -> int:
    """Rounded up to classes."""
    return -(-number // CLASSES) * CLASSES


def span_attention(
    q_BHTK: Tensor,
    k_BHTK: Tensor,
    v_BHTK: Tensor,
    *,
    past: Sequence[Tensor],
    windows: Sequence[int],
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
    windows_follow_spans: bool = False,
) -> Tensor:
    """As the door in the package describes it, [B, H, T, K]."""
    batch, _, block, _ = q_BHTK.shape
    dtype = q_BHTK.dtype
    if any(kv_BMXK.numel() >= 2**31 for kv_BMXK in past):
        raise UserError(
            "the memory of a layer is too large for the kernels: use smaller batches or micro_batches"
        )
    pasts = tuple((kv_BMXK.shape[1], kv_BMXK.shape[2] // 2) for kv_BMXK in past)
    layout = _layout(tuple(windows), pasts, batch, block, q_BHTK.device)
    slot_k_HPK, slot_v_HPK = (None, None) if slots is None else (x.to(dtype).contiguous() for x in slots)
    position_q = None
    if position_map_HKE is not None:
        position_q = position_queries(q_BHTK, position_bias_HK, position_map_HKE).to(dtype)
        position_bias_HK = None
    if position_bias_HK is not None and content_bias_HK is None:
        content_bias_HK = torch.zeros_like(position_bias_HK)
    with torch.autocast(q_BHTK.device.type, enabled=False):
        out: Tensor = _SpanAttention.apply(  # type: ignore[no-untyped-call]
            _rows_inside(q_BHTK),
            _rows_inside(k_BHTK.to(dtype)),
            _rows_inside(v_BHTK.to(dtype)),
            None if content_bias_HK is None else content_bias_HK.float().contiguous(),
            None if position_bias_HK is None else position_bias_HK.float(),
            position_q,
            position_keys,
            slot_k_HPK,
            slot_v_HPK,
            None if spans_H is None else spans_H.float(),
            filled_B,
            layout,
            Options(ramp, renormalise, first_distance, dropout, windows_follow_spans),
            *(kv_BMXK.to(dtype).transpose(0, 1).contiguous() for kv_BMXK in past),
        )
    return out


def _rows_inside(x_BHTK: Tensor) -> Tensor:
    """With the numbers of a row side by side, as the kernels read them."""
    return x_BHTK if x_BHTK.stride(-1) == 1 else x_BHTK.contiguous()


class _SpanAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BHTK: Tensor,
        k_BHTK: Tensor,
        v_BHTK: Tensor,
        content_bias_HK: Tensor | None,
        position_bias_HK: Tensor | None,
        position_q: Tensor | None,
        position_keys: Tensor | None,
        slot_k_HPK: Tensor | None,
        slot_v_HPK: Tensor | None,
        spans_H: Tensor | None,
        filled_B: Tensor | None,
        layout: Layout,
        options: Options,
        *pasts_MBXK: Tensor,
    ) -> Tensor:
        batch, heads, block, width = q_BHTK.shape
        past = _end_to_end(pasts_MBXK)
        out_BHTK = _like_rows(q_BHTK)
        lse_BHT = q_BHTK.new_empty(batch, heads, block, dtype=torch.float32)
        seed = _seed(q_BHTK.device) if options.dropout > 0 else None
        asked = q_BHTK if position_q is None else position_q
        if position_bias_HK is not None:
            asked = _head_after_head(q_BHTK, position_bias_HK)
        keys = table = None
        if position_keys is not None:
            keys = _moved(position_keys.to(asked.dtype), layout, options.first_distance)
            table = _distance_table(asked, keys, layout)
        tile = _tiles("forward", q_BHTK)
        kernels.forward_kernel[(triton.cdiv(block, tile["BM"]), batch * heads)](
            q_BHTK, k_BHTK, v_BHTK, past, table, slot_k_HPK, slot_v_HPK, content_bias_HK, out_BHTK, lse_BHT,
            layout.heads, spans_H, filled_B, seed,
            *_strides(q_BHTK, k_BHTK, v_BHTK, out_BHTK),
            batch, heads, block, 0 if slot_k_HPK is None else slot_k_HPK.shape[1],
            **_numbers(width, options),
            **_constants(q_BHTK, position_keys, spans_H, filled_B, options),
            HAS_SLOTS=slot_k_HPK is not None, WHOLE_SLOTS=_whole_tiles(slot_k_HPK, tile),
            HAS_BIAS=content_bias_HK is not None, FIRST=options.first_distance, **tile,
        )  # fmt: skip
        ctx.save_for_backward(
            q_BHTK, k_BHTK, v_BHTK, past, content_bias_HK, asked, position_keys, keys, slot_k_HPK, slot_v_HPK,
            spans_H, filled_B, table, out_BHTK, lse_BHT, seed,
        )  # fmt: skip
        ctx.has_position_bias, ctx.has_position_q = position_bias_HK is not None, position_q is not None
        ctx.layout, ctx.options = layout, options
        ctx.past_shapes = [past_MBXK.shape for past_MBXK in pasts_MBXK]
        return out_BHTK

    @staticmethod
    def backward(ctx: Any, dout_BHTK: Tensor) -> tuple[Tensor | None, ...]:
        (
            q_BHTK, k_BHTK, v_BHTK, past, content_bias_HK, asked, position_keys, keys, slot_k_HPK, slot_v_HPK,
            spans_H, filled_B, table, out_BHTK, lse_BHT, seed,
        ) = ctx.saved_tensors  # fmt: skip
        layout, options = ctx.layout, ctx.options
        batch, heads, block, width = q_BHTK.shape
        num_slots = 0 if slot_k_HPK is None else slot_k_HPK.shape[1]
        dout_BHTK = _rows_inside(dout_BHTK)
        inner_BHT = torch.empty_like(lse_BHT)
        dtable = None if table is None else torch.empty_like(table)
        # Side by side, as they are projected.
        dq_BHTK, dk_BHTK, dv_BHTK = _like_rows(q_BHTK, 3).chunk(3, dim=1)
        wants_past = any(ctx.needs_input_grad[-len(ctx.past_shapes) :])
        dpast = torch.empty_like(past) if wants_past else None
        numbers = _numbers(width, options)
        constants = _constants(q_BHTK, position_keys, spans_H, filled_B, options)
        tile = _tiles("queries", q_BHTK)
        query_tiles = triton.cdiv(block, tile["BM"])
        dspans = q_BHTK.new_empty(heads, batch, query_tiles, dtype=torch.float32)
        content_q_BHTK, dbiases = q_BHTK, None
        if content_bias_HK is not None:
            content_q_BHTK, dbiases = torch.empty_like(out_BHTK), dspans.new_empty(*dspans.shape, width)
        kernels.query_gradient_kernel[(query_tiles, batch * heads)](
            q_BHTK, k_BHTK, v_BHTK, past, table, slot_k_HPK, slot_v_HPK, content_bias_HK, out_BHTK, dout_BHTK,
            lse_BHT, inner_BHT, layout.heads, spans_H, filled_B, seed,
            dq_BHTK, dtable, dspans, dbiases, content_q_BHTK,
            *_strides(q_BHTK, k_BHTK, v_BHTK, out_BHTK, dout_BHTK, dq_BHTK),
            batch, heads, block, num_slots, **numbers, **constants, **tile,
            HAS_SLOTS=num_slots > 0, WHOLE_SLOTS=_whole_tiles(slot_k_HPK, tile),
            HAS_BIAS=dbiases is not None, FIRST=options.first_distance,
        )  # fmt: skip
        tile = _tiles("keys", q_BHTK)
        key_tiles = triton.cdiv(block, tile["BN"])
        if wants_past:
            key_tiles += triton.cdiv(layout.longest_reach, tile["BN"])
        kernels.key_gradient_kernel[(key_tiles, batch * heads)](
            content_q_BHTK, k_BHTK, v_BHTK, past, table, dout_BHTK, lse_BHT,
            inner_BHT, layout.heads, spans_H, filled_B, seed, dk_BHTK, dv_BHTK,
            past if dpast is None else dpast,
            *_strides(content_q_BHTK, k_BHTK, v_BHTK, dout_BHTK, dk_BHTK, dv_BHTK),
            batch, heads, block, **numbers, **constants, **tile, FIRST=options.first_distance,
        )  # fmt: skip
        dslot_k = dslot_v = None
        if slot_k_HPK is not None and slot_v_HPK is not None:
            tile = _tiles("slots", q_BHTK)
            slot_tiles = triton.cdiv(num_slots, tile["BN"])
            parts = min(batch, max(1, 1024 // (slot_tiles * heads)))
            lanes = triton.cdiv(batch, parts)
            parts = triton.cdiv(batch, lanes)
            sums = q_BHTK.new_empty(2, parts, *slot_k_HPK.shape, dtype=torch.float32)
            del numbers["ramp"], numbers["slope"]
            kernels.slot_gradient_kernel[(slot_tiles, heads, parts)](
                content_q_BHTK, slot_k_HPK, slot_v_HPK, dout_BHTK, lse_BHT, inner_BHT, seed,
                sums[0], sums[1],
                *_strides(content_q_BHTK, dout_BHTK),
                batch, heads, block, num_slots, lanes, **numbers, **tile,
                **{name: constants[name] for name in SLOT_CONSTANTS},
            )  # fmt: skip
            dslot_k, dslot_v = sums.sum(1).to(slot_k_HPK.dtype)
        dposition_q = dposition_keys = None
        if dtable is not None:
            dposition_q = _like_rows(asked).zero_() if ctx.has_position_q else None
            dasked = dq_BHTK if dposition_q is None else dposition_q
            dkeys = _distance_gradients(dtable, asked, keys, layout, numbers["scale"], dasked)
            dposition_keys = _moved_back(dkeys, position_keys, options.first_distance)
        dcontent_bias_HK = dposition_bias_HK = None
        if dbiases is not None:
            dcontent_bias_HK = dbiases.sum((1, 2))
            if ctx.has_position_bias:
                dposition_bias_HK = dq_BHTK.sum((0, 2), dtype=torch.float32) - dcontent_bias_HK
        dspans_H = None if spans_H is None else dspans.sum((1, 2))
        return (
            dq_BHTK, dk_BHTK, dv_BHTK, dcontent_bias_HK, dposition_bias_HK, dposition_q, dposition_keys,
            dslot_k, dslot_v, dspans_H, None, None, None, *_cut(dpast, ctx.past_shapes),
        )  # fmt: skip


def _like_rows(x_BHTK: Tensor, times: int = 1) -> Tensor:
    """Room for so many tensors of this shape that lies as [B, T, H, K]: what follows joins the heads."""
    batch, heads, block, width = x_BHTK.shape
    return x_BHTK.new_empty(batch, block, times * heads, width).transpose(1, 2)


def _head_after_head(q_BHTK: Tensor, bias_HK: Tensor) -> Tensor:
    """q + bias, which lies as [H, B, T, K]: every head's rows go into products of their own."""
    batch, heads, block, width = q_BHTK.shape
    room_HBTK = q_BHTK.new_empty(heads, batch, block, width)
    return torch.add(q_BHTK, bias_HK.to(q_BHTK.dtype)[:, None], out=room_HBTK.transpose(0, 1))


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers of some tensors in one row: without a copy if they follow each other in memory."""
    first = tensors[0]
    starts = accumulate((tensor.numel() for tensor in tensors), initial=first.storage_offset())
    follow = all(
        tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and tensor.storage_offset() == start
        for tensor, start in zip(tensors, starts, strict=False)
    )
    if follow:
        return first.as_strided((sum(map(torch.numel, tensors)),), (1,))
    return torch.cat([tensor.flatten() for tensor in tensors])


def _cut(row: Tensor | None, shapes: Sequence[torch.Size]) -> list[Tensor | None]:
    """The way back: tensors of these shapes."""
    if row is None:
        return [None] * len(shapes)
    parts = row.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _seed(device: torch.device) -> Tensor:
    return torch.randint(2**31, (1,), dtype=torch.int32, device=device)


def _moved(position_keys: Tensor, layout: Layout, first_distance: int) -> Tensor:
    """Position keys, oldest first, for each class moved on by one more row, [C, S, K] or [H, C, S, K].

    S is that of the widest table, a narrower one has the last of it. Rows that are no distance are zeros.
    """
    columns = max(table.columns for table in layout.tables)
    near = position_keys[..., : columns - CLASSES, :].flip(-2)
    after = CLASSES - 1 + first_distance  # distance 0 is the last column but 7 of the first class
    oldest_first = F.pad(near, (0, 0, columns + CLASSES - 1 - after - near.shape[-2], after))
    return oldest_first.unfold(-2, columns, 1).mT.flip(-3)


def _moved_back(dkeys_HCRK: Tensor, position_keys: Tensor, first_distance: int) -> Tensor:
    """The gradient of position keys from those of `_moved`, which a margin of CLASSES zeros surrounds.

    A key has moved on by one row from class to class: so does the view, and its sums are in float32.
    """
    heads, _, rows, width = dkeys_HCRK.shape
    oldest_first = rows - CLASSES - 1
    moved_together = dkeys_HCRK.as_strided(
        (heads, CLASSES, oldest_first, width),
        (CLASSES * rows * width, (rows + 1) * width, width, 1),
        width,
    )
    dsums = moved_together.sum((0, 1) if position_keys.dim() == 2 else 1, dtype=torch.float32)
    last = oldest_first - (CLASSES - 1 + first_distance)
    near = min(position_keys.shape[-2], rows - 3 * CLASSES)
    dnear = dsums[..., last - near : last, :].flip(-2)
    return F.pad(dnear, (0, 0, 0, position_keys.shape[-2] - near)).to(position_keys.dtype)


def _keys_of(keys: Tensor, head: int, table: Table) -> Tensor:
    """The part of `_moved` position keys that a head's table is made with, [C, S, K]."""
    return (keys if keys.dim() == 3 else keys[head])[:, keys.shape[-2] - table.columns :]


def _by_class(x_BTK: Tensor) -> Tensor:
    """A head's rows, every eighth together, [C, N, K]: a view, unless a text ends amidst eight."""
    missing = -x_BTK.shape[1] % CLASSES
    x_BTK = F.pad(x_BTK, (0, 0, 0, missing)) if missing else x_BTK
    return torch.unflatten(x_BTK, 1, (-1, CLASSES)).permute(2, 0, 1, 3).flatten(1, 2)


def _set_by_class(x_BTK: Tensor, rows_CNK: Tensor) -> None:
    """Put a head's rows back, if they were no view."""
    batch, block, _ = x_BTK.shape
    if rows_CNK.data_ptr() != x_BTK.data_ptr():
        back = torch.unflatten(rows_CNK, 1, (batch, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        x_BTK.copy_(back[:, :block])


def _table_of(numbers: Tensor, table: Table) -> Tensor:
    """A head's table of distances, [C, N, S]."""
    own = numbers[table.begin : table.begin + table.rows * table.columns]
    return own.view(-1, CLASSES, table.columns).transpose(0, 1)


def _distance_table(asked_BHTK: Tensor, keys: Tensor, layout: Layout) -> Tensor:
    """q_t . p_d for every query and the distances of its head's group, head after head."""
    numbers = asked_BHTK.new_empty(layout.table_size)
    for head, table in enumerate(layout.tables):
        keys_CSK = _keys_of(keys, head, table)
        torch.bmm(_by_class(asked_BHTK[:, head]), keys_CSK.mT, out=_table_of(numbers, table))
    return numbers


def _distance_gradients(
    dnumbers: Tensor,
    asked_BHTK: Tensor,
    keys: Tensor,
    layout: Layout,
    scale: float,
    dasked_BHTK: Tensor,
) -> Tensor:
    """The gradient of the `_moved` position keys of every head from that of the table, with CLASSES zeros
    before and after. That of its queries is added to `dasked_BHTK`.
    """
    classes, columns, width = keys.shape[-3:]
    dkeys_HCRK = keys.new_zeros(len(layout.tables), classes, columns + 2 * CLASSES, width)
    dkeys_HCSK = dkeys_HCRK[:, :, CLASSES : CLASSES + columns]
    for head, table in enumerate(layout.tables):
        dtable_CNS, keys_CSK = _table_of(dnumbers, table), _keys_of(keys, head, table)
        dasked_CNK = _by_class(dasked_BHTK[:, head])
        dasked_CNK.baddbmm_(dtable_CNS, keys_CSK, alpha=scale)
        _set_by_class(dasked_BHTK[:, head], dasked_CNK)
        asked_CNK = _by_class(asked_BHTK[:, head])
        _keys_of(dkeys_HCSK, head, table).baddbmm_(dtable_CNS.mT, asked_CNK, beta=0, alpha=scale)
    return dkeys_HCRK


def _strides(*tensors_BHTK: Tensor) -> list[int]:
    return [tensor.stride(dim) for tensor in tensors_BHTK for dim in range(3)]


def _numbers(width: int, options: Options) -> dict[str, float]:
    return {
        "ramp": float(options.ramp),
        "slope": 1 / options.ramp,
        "scale": 1 / math.sqrt(width),
        "threshold": int(options.dropout * 2**32),
        "keep_scale": 1 / (1 - options.dropout),
    }


def _constants(
    q_BHTK: Tensor,
    position_keys: Tensor | None,
    spans_H: Tensor | None,
    filled_B: Tensor | None,
    options: Options,
) -> dict[str, Any]:
    width = q_BHTK.shape[-1]
    return {
        "WIDTH": width,
        "BK": max(16, triton.next_power_of_2(width)),
        "HAS_POSITIONS": position_keys is not None,
        "HAS_SPANS": spans_H is not None,
        "RENORMALISE": options.renormalise,
        "FOLLOWS": options.windows_follow_spans and spans_H is not None,
        "HAS_FILLED": filled_B is not None,
        "HAS_DROPOUT": options.dropout > 0,
        "PRECISION": "ieee" if q_BHTK.dtype == torch.float32 else "tf32",
    }


def _whole_tiles(slot_k_HPK: Tensor | None, tile: dict[str, int]) -> bool:
    """Whether the slots fill their tiles."""
    return slot_k_HPK is not None and slot_k_HPK.shape[1] % tile["BN"] == 0


def _tiles(kernel: str, q_BHTK: Tensor) -> dict[str, int]:
    names = ["BM", "BN", "num_warps", "num_stages"]
    if torch.version.hip is None:
        names.append("maxnreg")
    small = q_BHTK.dtype == torch.float32 or q_BHTK.shape[-1] > 64
    return dict(zip(names, (32, 32, 4, 2) if small else TILES[kernel], strict=False))
