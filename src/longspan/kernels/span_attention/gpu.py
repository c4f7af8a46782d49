"""Span attention on a GPU: the kernels of `triton_kernels.py`, the products around them, and autograd.

Heads come in groups that remember equally far. What a group remembers is one tensor of its keys and values,
position by position; end to end they are the kernels' `PAST`. The term for the distance is a table, as wide
for a head as the window of its group (`relative_bias.py`). It is kept for the backward pass, which turns its
gradient into those of queries and position keys.

The kernels add the bias of the content to queries as they read them, and sum its gradient in parts. What the
table is made of, q + v, is written out. Its gradient is that of q too, less what came from the content.

Shapes: as in the package, and G heads of a group, X = 2G (the keys of G heads, then their values).
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

from longspan.errors import UserError
from longspan.kernels.hashing import new_seed
from longspan.kernels.span_attention import triton_kernels as kernels
from longspan.kernels.span_attention.queries import biased
from longspan.kernels.span_attention.relative_bias import (
    CLASSES,
    MARGIN,
    Sizes,
    distance_gradients,
    distance_table,
    whole,
)

LARGEST_HEAD = 128

# Found by trying on an H200, in half precision and heads of 64: queries and keys of a tile, warps, stages of
# the pipeline, and where it helps the most registers of a thread: more programs share a multiprocessor then.
TILES: dict[str, tuple[int, ...]] = {
    "forward": (64, 32, 4, 3, 128),
    "far forward": (64, 64, 4, 2, 128),
    "queries": (64, 32, 4, 3, 128),
    "dropped queries": (64, 32, 4, 3, 168),
    "keys": (64, 64, 4, 2),
    "kept keys": (32, 64, 4, 4),
    "persistent": (64, 64, 4, 3),
}

FAR = 512
"""Keys of a head, on average, from which on wide tiles go through them faster, and tables are large."""

# Of what is fixed when a kernel is compiled, what matters to persistent: they have no distance.
SLOT_CONSTANTS = ("WIDTH", "BK", "HAS_SPANS", "RENORMALISE", "HAS_DROPOUT", "PRECISION")


class Layout(NamedTuple):
    """Where every head finds its past and its table, in rows of 8 numbers, and how large all of it is."""

    heads: Tensor
    table: Sizes
    longest_reach: int


class Options(NamedTuple):
    """What is the same for all heads."""

    ramp: int
    renormalise: bool
    first_distance: int
    dropout: float
    windows_follow_spans: bool


class Given(NamedTuple):
    """What goes in, with all pasts end to end; `keys` are the position keys as kernels read them."""

    q_BHTK: Tensor
    k_BHTK: Tensor
    v_BHTK: Tensor
    past: Tensor
    content_bias_HK: Tensor | None
    position_bias_HK: Tensor | None
    position_keys: Tensor | None
    keys: Tensor | None
    persistent_k_HPK: Tensor | None
    persistent_v_HPK: Tensor | None
    spans_H: Tensor | None
    filled_B: Tensor | None


class Made(NamedTuple):
    """What Triton's forward pass leaves for its backward pass."""

    asked_BHTK: Tensor
    table: Tensor | None
    lse_BHT: Tensor


class Gradients(NamedTuple):
    """Those that are sums over queries, in the order of what they belong to."""

    content_bias_HK: Tensor | None = None
    position_bias_HK: Tensor | None = None
    position_keys: Tensor | None = None
    persistent_k_HPK: Tensor | None = None
    persistent_v_HPK: Tensor | None = None
    spans_H: Tensor | None = None


@cache  # for good: a recorded step knows where its tables lie
def _layout(
    windows: tuple[int, ...],
    pasts: tuple[tuple[int, int], ...],
    batch: int,
    block: int,
    device: torch.device,
) -> Layout:
    """`pasts` are (rows, heads) of every group."""
    heads, head, past, before, most = [], 0, 0, 0, 0
    rows = batch * whole(block)
    for reach, size in pasts:
        columns = whole(max(windows[head : head + size])) + CLASSES
        for index in range(size):
            keys, values, step = past + index, past + size + index, 2 * size
            begin = MARGIN + rows * before
            heads.append([windows[head + index], reach, keys, values, step, batch * step, begin, columns])
            before += columns
        head, past, most = head + size, past + batch * reach * 2 * size, max(most, columns)
    table = Sizes(2 * MARGIN + rows * before, before, most)
    return Layout(torch.tensor(heads, device=device), table, max(reach for reach, _ in pasts))


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
    persistent: tuple[Tensor, Tensor] | None = None,
    spans_H: Tensor | None = None,
    ramp: int = 1,
    renormalise: bool = True,
    first_distance: int = 1,
    dropout: float = 0.0,
    windows_follow_spans: bool = False,
) -> Tensor:
    """As the door in the package describes it, [B, H, T, K]."""
    dtype = q_BHTK.dtype
    if any(kv_BMXK.numel() >= 2**31 for kv_BMXK in past):
        raise UserError(
            "the memory of a layer is too large for the kernels: use smaller batches or micro_batches"
        )
    persistent_k_HPK, persistent_v_HPK = (
        (None, None) if persistent is None else (x.to(dtype).contiguous() for x in persistent)
    )
    if position_keys is not None and position_map_HKE is not None:
        # Even for few queries: mapped, they are as wide as the model, and tiles of such rows find no room.
        position_keys = position_keys @ position_map_HKE.mT
    if position_bias_HK is not None and content_bias_HK is None:
        content_bias_HK = torch.zeros_like(position_bias_HK)
    with torch.autocast(q_BHTK.device.type, enabled=False):
        out: Tensor = _SpanAttention.apply(  # type: ignore[no-untyped-call]
            _rows_inside(q_BHTK),
            _rows_inside(k_BHTK.to(dtype)),
            _rows_inside(v_BHTK.to(dtype)),
            None if content_bias_HK is None else content_bias_HK.float().contiguous(),
            None if position_bias_HK is None else position_bias_HK.float(),
            position_keys,
            persistent_k_HPK,
            persistent_v_HPK,
            None if spans_H is None else spans_H.float().contiguous(),
            filled_B,
            tuple(windows),
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
        position_keys: Tensor | None,
        persistent_k_HPK: Tensor | None,
        persistent_v_HPK: Tensor | None,
        spans_H: Tensor | None,
        filled_B: Tensor | None,
        windows: tuple[int, ...],
        options: Options,
        *pasts_MBXK: Tensor,
    ) -> Tensor:
        given = Given(
            q_BHTK, k_BHTK, v_BHTK, _end_to_end(pasts_MBXK), content_bias_HK, position_bias_HK, position_keys,
            None if position_keys is None else position_keys.to(q_BHTK.dtype).contiguous(),
            persistent_k_HPK, persistent_v_HPK, spans_H, filled_B,
        )  # fmt: skip
        batch, _, block, _ = q_BHTK.shape
        pasts = tuple((past.shape[0], past.shape[2] // 2) for past in pasts_MBXK)
        ctx.layout = _layout(windows, pasts, batch, block, q_BHTK.device)
        seed = new_seed(q_BHTK.device) if options.dropout > 0 else None
        out_BHTK = _like_rows(q_BHTK)
        made = _forward(given, out_BHTK, seed, ctx.layout, options)
        ctx.save_for_backward(out_BHTK, seed, *made, *given)
        ctx.options, ctx.past_shapes = options, [past_MBXK.shape for past_MBXK in pasts_MBXK]
        return out_BHTK

    @staticmethod
    def backward(ctx: Any, dout_BHTK: Tensor) -> tuple[Tensor | None, ...]:
        out_BHTK, seed, *saved = ctx.saved_tensors
        made, given = Made(*saved[: len(Made._fields)]), Given(*saved[len(Made._fields) :])
        # Side by side, as they are projected.
        dqkv_BHTK = _like_rows(given.q_BHTK, 3).chunk(3, dim=1)
        dpast = torch.empty_like(given.past) if any(ctx.needs_input_grad[-len(ctx.past_shapes) :]) else None
        gradients = _backward(
            _rows_inside(dout_BHTK), given, made, out_BHTK, seed, dqkv_BHTK, dpast, ctx.layout, ctx.options
        )
        return (*dqkv_BHTK, *gradients, None, None, None, *_cut(dpast, ctx.past_shapes))


def _forward(given: Given, out_BHTK: Tensor, seed: Tensor | None, layout: Layout, options: Options) -> Made:
    batch, heads, block, width = given.q_BHTK.shape
    q_BHTK, k_BHTK, v_BHTK, persistent_k_HPK = (
        given.q_BHTK,
        given.k_BHTK,
        given.v_BHTK,
        given.persistent_k_HPK,
    )
    lse_BHT = q_BHTK.new_empty(batch, heads, block, dtype=torch.float32)
    asked_BHTK = biased(q_BHTK, given.position_bias_HK)
    table = None
    if given.keys is not None:
        table = distance_table(asked_BHTK, given.keys, layout.heads, layout.table, options.first_distance)
    num_persistent = 0 if persistent_k_HPK is None else persistent_k_HPK.shape[1]
    tile = _tiles("far forward" if _looks_far(layout, heads, num_persistent) else "forward", q_BHTK)
    kernels.forward_kernel[(triton.cdiv(block, tile["BM"]), batch * heads)](
        q_BHTK, k_BHTK, v_BHTK, given.past, table, persistent_k_HPK, given.persistent_v_HPK,
        given.content_bias_HK, out_BHTK, lse_BHT, layout.heads, given.spans_H, given.filled_B, seed,
        *_strides(q_BHTK, k_BHTK, v_BHTK, out_BHTK),
        batch, heads, block, num_persistent,
        **_numbers(width, options), **_constants(given, options),
        HAS_SLOTS=persistent_k_HPK is not None, WHOLE_SLOTS=_whole_tiles(persistent_k_HPK, tile),
        HAS_BIAS=given.content_bias_HK is not None, FIRST=options.first_distance, **tile,
    )  # fmt: skip
    return Made(asked_BHTK, table, lse_BHT)


def _backward(
    dout_BHTK: Tensor,
    given: Given,
    made: Made,
    out_BHTK: Tensor,
    seed: Tensor | None,
    dqkv_BHTK: Sequence[Tensor],
    dpast: Tensor | None,
    layout: Layout,
    options: Options,
) -> Gradients:
    """Write the gradients of queries, keys and values, and of the past if it is not None; give the others."""
    (
        q_BHTK, k_BHTK, v_BHTK, past, content_bias_HK, position_bias_HK, position_keys, keys,
        persistent_k_HPK, persistent_v_HPK, spans_H, filled_B,
    ) = given  # fmt: skip
    asked_BHTK, table, lse_BHT = made
    dq_BHTK, dk_BHTK, dv_BHTK = dqkv_BHTK
    batch, heads, block, width = q_BHTK.shape
    num_persistent = 0 if persistent_k_HPK is None else persistent_k_HPK.shape[1]
    inner_BHT = torch.empty_like(lse_BHT)
    dtable = None if table is None else torch.empty_like(table)
    # With dropout, a hash for every weight, small tables of them are sooner kept than made once more.
    keeps = options.dropout > 0 and not _looks_far(layout, heads)
    weights = torch.empty_like(table) if keeps and table is not None else None
    numbers, constants = _numbers(width, options), _constants(given, options)
    tile = _tiles("dropped queries" if options.dropout > 0 else "queries", q_BHTK)
    query_tiles = triton.cdiv(block, tile["BM"])
    dspans = q_BHTK.new_empty(heads, batch, query_tiles, dtype=torch.float32)
    content_q_BHTK, dbiases = q_BHTK, None
    if content_bias_HK is not None:
        content_q_BHTK, dbiases = torch.empty_like(out_BHTK), dspans.new_empty(*dspans.shape, width)
    kernels.query_gradient_kernel[(query_tiles, batch * heads)](
        q_BHTK, k_BHTK, v_BHTK, past, table, persistent_k_HPK, persistent_v_HPK, content_bias_HK, out_BHTK,
        dout_BHTK,
        lse_BHT, inner_BHT, layout.heads, spans_H, filled_B, seed,
        dq_BHTK, dtable, weights, dspans, dbiases, content_q_BHTK,
        *_strides(q_BHTK, k_BHTK, v_BHTK, out_BHTK, dout_BHTK, dq_BHTK),
        batch, heads, block, num_persistent, **numbers, **constants, **tile,
        HAS_SLOTS=num_persistent > 0, WHOLE_SLOTS=_whole_tiles(persistent_k_HPK, tile),
        HAS_BIAS=dbiases is not None, KEEPS=weights is not None, FIRST=options.first_distance,
    )  # fmt: skip
    tile = _tiles("keys" if weights is None else "kept keys", q_BHTK)
    key_tiles = triton.cdiv(block, tile["BN"])
    if dpast is not None:
        key_tiles += triton.cdiv(layout.longest_reach, tile["BN"])
    kernels.key_gradient_kernel[(key_tiles, batch * heads)](
        content_q_BHTK, k_BHTK, v_BHTK, past, table, weights, dtable, dout_BHTK, lse_BHT,
        inner_BHT, layout.heads, spans_H, filled_B, seed, dk_BHTK, dv_BHTK,
        past if dpast is None else dpast,
        *_strides(content_q_BHTK, k_BHTK, v_BHTK, dout_BHTK, dk_BHTK, dv_BHTK),
        batch, heads, block, **numbers, **constants, **tile,
        KEEPS=weights is not None, FIRST=options.first_distance,
    )  # fmt: skip
    del weights
    dslot_k = dslot_v = None
    if persistent_k_HPK is not None and persistent_v_HPK is not None:
        tile = _tiles("persistent", q_BHTK)
        persistent_tiles = triton.cdiv(num_persistent, tile["BN"])
        parts = min(batch, max(1, 1024 // (persistent_tiles * heads)))
        lanes = triton.cdiv(batch, parts)
        parts = triton.cdiv(batch, lanes)
        sums = q_BHTK.new_empty(2, parts, *persistent_k_HPK.shape, dtype=torch.float32)
        del numbers["ramp"], numbers["slope"]
        kernels.persistent_gradient_kernel[(persistent_tiles, heads, parts)](
            content_q_BHTK, persistent_k_HPK, persistent_v_HPK, dout_BHTK, lse_BHT, inner_BHT, seed,
            sums[0], sums[1],
            *_strides(content_q_BHTK, dout_BHTK),
            batch, heads, block, num_persistent, lanes, **numbers, **tile,
            **{name: constants[name] for name in SLOT_CONSTANTS},
        )  # fmt: skip
        dslot_k, dslot_v = sums.sum(1).to(persistent_k_HPK.dtype)
    dposition_keys = None
    if dtable is not None and keys is not None and position_keys is not None:
        dposition_keys = distance_gradients(
            dtable, asked_BHTK, keys, layout.heads, layout.table, options.first_distance,
            scale=numbers["scale"], dasked_BHTK=dq_BHTK, dtype=position_keys.dtype,
        )  # fmt: skip
    dcontent_bias_HK = dposition_bias_HK = None
    if dbiases is not None:
        dcontent_bias_HK = dbiases.sum((1, 2))
        if position_bias_HK is not None:
            dposition_bias_HK = dq_BHTK.sum((0, 2), dtype=torch.float32) - dcontent_bias_HK
    dspans_H = None if spans_H is None else dspans.sum((1, 2))
    return Gradients(dcontent_bias_HK, dposition_bias_HK, dposition_keys, dslot_k, dslot_v, dspans_H)


def _looks_far(layout: Layout, heads: int, num_persistent: int = 0) -> bool:
    return layout.table.columns / heads + num_persistent >= FAR


def _like_rows(x_BHTK: Tensor, times: int = 1) -> Tensor:
    """Room for so many tensors of this shape that lies as [B, T, H, K]: what follows joins the heads."""
    batch, heads, block, width = x_BHTK.shape
    return x_BHTK.new_empty(batch, block, times * heads, width).transpose(1, 2)


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


def _constants(given: Given, options: Options) -> dict[str, Any]:
    width = given.q_BHTK.shape[-1]
    return {
        "WIDTH": width,
        "BK": max(16, triton.next_power_of_2(width)),
        "HAS_POSITIONS": given.keys is not None,
        "HAS_SPANS": given.spans_H is not None,
        "RENORMALISE": options.renormalise,
        "FOLLOWS": options.windows_follow_spans and given.spans_H is not None,
        "HAS_FILLED": given.filled_B is not None,
        "HAS_DROPOUT": options.dropout > 0,
        "PRECISION": "ieee" if given.q_BHTK.dtype == torch.float32 else "tf32",
    }


def _whole_tiles(persistent_k_HPK: Tensor | None, tile: dict[str, int]) -> bool:
    """Whether the persistent fill their tiles."""
    return persistent_k_HPK is not None and persistent_k_HPK.shape[1] % tile["BN"] == 0


def _tiles(kernel: str, q_BHTK: Tensor) -> dict[str, int]:
    names = ["BM", "BN", "num_warps", "num_stages"]
    if torch.version.hip is None:
        names.append("maxnreg")
    small = q_BHTK.dtype == torch.float32 or q_BHTK.shape[-1] > 64
    return dict(zip(names, (32, 32, 4, 2) if small else TILES[kernel], strict=False))
