"""The term for the distance, q_t . p_d, as a table of all queries and the distances that their heads see.

The kernels of attention read it, and write its gradient, as `triton_kernels.py` says: query t of a text has
distance d in column S - 8 + t % 8 - d of its row. So a tile here has every eighth query: their columns are
the same.

All heads are computed at once, each as wide as its window. A program of the first two kernels has a tile of
queries and loops over the columns. For the gradient of position keys, a program has a tile of columns and
loops over the queries of one class; the last kernel adds up the sums of all classes and heads.

Position keys are contiguous.

Shapes: as in the package, and S columns of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CLASSES = 8
"""Queries t with equal t % 8 are a class; row t of the table is shifted by t % 8 columns."""

MARGIN = 256
"""How far beyond the table a tile of attention may read."""

DISTANCES = 32
"""Position keys whose gradients are added up by one program."""

# Tuned on an H200, in half precision and with heads of 64: queries and columns of a tile, and warps.
TILES = {"table": (128, 128, 8), "queries": (128, 64, 8), "keys": (128, 64, 4)}

_CLASSES, _MARGIN = tl.constexpr(CLASSES), tl.constexpr(MARGIN)


class Sizes(NamedTuple):
    """Elements of the table with its margins, columns of all heads, and most columns of a head."""

    numbers: int
    columns: int
    most: int


def whole(number: int) -> int:
    """Rounded up to a multiple of `CLASSES`."""
    return -(-number // CLASSES) * CLASSES


def distance_table(
    asked_BHTK: Tensor, position_keys: Tensor, heads: Tensor, sizes: Sizes, first_distance: int
) -> Tensor:
    """The table, head after head. Position keys are [L, K] or [H, L, K], `heads` as in the kernels."""
    numbers = asked_BHTK.new_empty(sizes.numbers)
    tile, common = _tile("table", asked_BHTK), _common(asked_BHTK, position_keys, first_distance)
    _table_kernel[_query_tiles(asked_BHTK, tile)](
        asked_BHTK, position_keys, numbers, heads, *asked_BHTK.stride()[:3], **common, **tile
    )
    return numbers


def distance_gradients(
    dnumbers: Tensor, asked_BHTK: Tensor, position_keys: Tensor, heads: Tensor, sizes: Sizes,
    first_distance: int, *, scale: float, dasked_BHTK: Tensor, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The gradient of the position keys from that of the table; that of the queries is added to `dasked`."""
    tile, common = _tile("queries", asked_BHTK), _common(asked_BHTK, position_keys, first_distance)
    _query_kernel[_query_tiles(asked_BHTK, tile)](
        dnumbers, position_keys, dasked_BHTK, heads, *dasked_BHTK.stride()[:3], scale, **common, **tile
    )
    batch, num_heads, _, width = asked_BHTK.shape
    sums = asked_BHTK.new_empty(CLASSES * sizes.columns, width, dtype=torch.float32)
    tile = _tile("keys", asked_BHTK)
    _key_kernel[(triton.cdiv(sizes.most, tile["BN"]) * CLASSES, num_heads)](
        dnumbers, asked_BHTK, sums, heads, *asked_BHTK.stride()[:3], **tile,
        **{name: common[name] for name in ("batch", "T", "WIDTH", "BK", "PRECISION")},
    )  # fmt: skip
    dposition_keys = torch.empty_like(position_keys, dtype=dtype)
    shared = position_keys.dim() == 2
    _sum_kernel[(triton.cdiv(position_keys.shape[-2], DISTANCES), 1 if shared else num_heads)](
        sums, dposition_keys, heads, batch * whole(asked_BHTK.shape[2]), num_heads, position_keys.shape[-2],
        scale, SHARED=shared, BD=DISTANCES, **{name: common[name] for name in ("FIRST", "WIDTH", "BK")},
    )  # fmt: skip
    return dposition_keys


def _tile(kernel: str, x_BHTK: Tensor) -> dict[str, int]:
    small = x_BHTK.dtype == torch.float32 or x_BHTK.shape[-1] > 64
    return dict(zip(("BM", "BN", "num_warps"), (32, 32, 4) if small else TILES[kernel], strict=True))


def _query_tiles(x_BHTK: Tensor, tile: dict[str, int]) -> tuple[int, int]:
    batch, heads, block, _ = x_BHTK.shape
    return triton.cdiv(batch * whole(block) // CLASSES, tile["BM"]) * CLASSES, heads


def _common(asked_BHTK: Tensor, position_keys: Tensor, first_distance: int) -> dict[str, Any]:
    batch, _, block, width = asked_BHTK.shape
    return {
        "batch": batch,
        "T": block,
        "length": position_keys.shape[-2],
        "keys_of_head": position_keys.stride(0) if position_keys.dim() == 3 else 0,
        "FIRST": first_distance,
        "WIDTH": width,
        "BK": max(16, triton.next_power_of_2(width)),
        "PRECISION": "ieee" if asked_BHTK.dtype == torch.float32 else "tf32",
    }


@triton.jit
def _columns_of(HEADS, h):
    """Where a head's table begins, and its columns."""
    begin = tl.multiple_of(tl.load(HEADS + h * 8 + 6), 8)
    return begin, tl.multiple_of(tl.load(HEADS + h * 8 + 7).to(tl.int32), 8)


@triton.jit
def _queries(n, of_class, batch, T):
    """Of the queries n of a class, in all texts: rows of the table, texts, places in them, which exist."""
    row = n * _CLASSES + of_class
    rows = tl.cdiv(T, _CLASSES) * _CLASSES
    b, t = row // rows, row % rows
    return row, b, t, (b < batch) & (t < T)


@triton.jit
def _rows_at(x, b, t, x_b, x_t, BK: tl.constexpr):
    return x + (b.to(tl.int64) * x_b + t * x_t)[:, None] + tl.arange(0, BK)[None, :]


@triton.jit
def _keys(P, column, of_class, columns, length, FIRST: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr):
    """Position keys of some columns, [BN, BK]: zeros where there is no such distance."""
    i = columns - _CLASSES + of_class - FIRST - column
    kk = tl.arange(0, BK)
    there = ((i >= 0) & (i < length) & (column < columns))[:, None] & (kk < WIDTH)[None, :]
    return tl.load(P + i[:, None] * WIDTH + kk[None, :], mask=there, other=0.0)


@triton.jit
def _table_kernel(
    Q, P, R, HEADS, q_b, q_h, q_t, batch, T, length, keys_of_head,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    of_class = tl.program_id(0) % _CLASSES
    h = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest windows come last in HEADS and start first
    begin, columns = _columns_of(HEADS, h)
    n = tl.program_id(0) // _CLASSES * BM + tl.arange(0, BM)
    row, b, t, there = _queries(n, of_class, batch, T)
    inside = there[:, None] & (tl.arange(0, BK) < WIDTH)[None, :]
    q = tl.load(_rows_at(Q + h * q_h, b, t, q_b, q_t, BK), mask=inside, other=0.0)
    own = R + begin + row.to(tl.int64)[:, None] * columns
    for c0 in range(0, columns, BN):
        column = c0 + tl.arange(0, BN)
        p = _keys(P + h * keys_of_head, column, of_class, columns, length, FIRST, WIDTH, BK).to(q.dtype)
        r = tl.dot(q, tl.trans(p), input_precision=PRECISION)
        tl.store(own + column[None, :], r.to(q.dtype), mask=there[:, None] & (column < columns)[None, :])


@triton.jit
def _query_kernel(
    DR, P, DQ, HEADS, dq_b, dq_h, dq_t, scale, batch, T, length, keys_of_head,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    of_class = tl.program_id(0) % _CLASSES
    h = tl.num_programs(1) - 1 - tl.program_id(1)
    begin, columns = _columns_of(HEADS, h)
    n = tl.program_id(0) // _CLASSES * BM + tl.arange(0, BM)
    row, b, t, there = _queries(n, of_class, batch, T)
    own = DR + begin + row.to(tl.int64)[:, None] * columns
    dq = tl.zeros([BM, BK], tl.float32)
    for c0 in range(0, columns, BN):
        column = c0 + tl.arange(0, BN)
        dr = tl.load(own + column[None, :], mask=there[:, None] & (column < columns)[None, :], other=0.0)
        p = _keys(P + h * keys_of_head, column, of_class, columns, length, FIRST, WIDTH, BK).to(dr.dtype)
        dq += tl.dot(dr, p, input_precision=PRECISION)
    inside = there[:, None] & (tl.arange(0, BK) < WIDTH)[None, :]
    at = _rows_at(DQ + h * dq_h, b, t, dq_b, dq_t, BK)
    before = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (before + dq * scale).to(DQ.dtype.element_ty), mask=inside)


@triton.jit
def _sums_of(SUMS, begin, columns, of_class, rows, WIDTH: tl.constexpr):
    """Where the sums of a head's class begin, a row for every column: tables before it have as many rows."""
    return SUMS + ((begin - _MARGIN) // rows * _CLASSES + of_class * columns) * WIDTH


@triton.jit
def _key_kernel(
    DR, Q, SUMS, HEADS, q_b, q_h, q_t, batch, T,
    WIDTH: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    of_class = tl.program_id(0) % _CLASSES
    h = tl.num_programs(1) - 1 - tl.program_id(1)
    begin, columns = _columns_of(HEADS, h)
    c0 = tl.program_id(0) // _CLASSES * BN
    if c0 < columns:
        column, kk = c0 + tl.arange(0, BN), tl.arange(0, BK)
        rows = batch * (tl.cdiv(T, _CLASSES) * _CLASSES)
        sums = tl.zeros([BN, BK], tl.float32)
        for n0 in range(0, rows // _CLASSES, BM):
            row, b, t, there = _queries(n0 + tl.arange(0, BM), of_class, batch, T)
            at = DR + begin + row.to(tl.int64)[:, None] * columns + column[None, :]
            dr = tl.load(at, mask=there[:, None] & (column < columns)[None, :], other=0.0)
            inside = there[:, None] & (kk < WIDTH)[None, :]
            q = tl.load(_rows_at(Q + h * q_h, b, t, q_b, q_t, BK), mask=inside, other=0.0)
            sums += tl.dot(tl.trans(dr), q.to(dr.dtype), input_precision=PRECISION)
        own = _sums_of(SUMS, begin, columns, of_class, rows, WIDTH)
        mask = (column < columns)[:, None] & (kk < WIDTH)[None, :]
        tl.store(own + column[:, None] * WIDTH + kk[None, :], sums, mask=mask)


@triton.jit
def _sum_kernel(
    SUMS, DP, HEADS, rows, H, length, scale,
    SHARED: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BD + tl.arange(0, BD)
    kk = tl.arange(0, BK)
    first_head = 0 if SHARED else tl.program_id(1)
    last_head = H if SHARED else first_head + 1
    total = tl.zeros([BD, BK], tl.float32)
    for h in range(first_head, last_head):
        begin, columns = _columns_of(HEADS, h)
        for of_class in tl.static_range(_CLASSES):
            column = columns - _CLASSES + of_class - FIRST - i
            there = ((column >= 0) & (column < columns))[:, None] & (kk < WIDTH)[None, :]
            own = _sums_of(SUMS, begin, columns, of_class, rows, WIDTH)
            total += tl.load(own + column[:, None] * WIDTH + kk[None, :], mask=there, other=0.0)
    at = DP + (tl.program_id(1) * length + i)[:, None] * WIDTH + kk[None, :]
    inside = (i < length)[:, None] & (kk < WIDTH)[None, :]
    tl.store(at, (total * scale).to(DP.dtype.element_ty), mask=inside)
