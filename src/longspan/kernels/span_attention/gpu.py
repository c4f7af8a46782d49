"""Span attention on a GPU: the kernels of `triton_kernels.py`, the products around them, and autograd.

Heads of a group have memories of one length. The past of a group is one tensor of its keys and values,
position-major; the kernels' `PAST` is all of these end to end. The term for the distance is a table, as wide
for a head as the longest window of its group (`relative_bias.py`). The backward pass computes the gradients
of queries and position keys from that of the table.

The kernels add the content bias u to queries as they read them, and sum its gradient in parts. The queries
q + v of the table are stored. Their gradient is a part of that of q; the gradient of q minus the part from
the content is the gradient of v.

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
from longspan.kernels.layout import contiguous_rows, strides
from longspan.kernels.span_attention import triton_kernels as kernels
from longspan.kernels.span_attention.context import AttentionContext
from longspan.kernels.span_attention.relative_bias import (
    CLASSES,
    MARGIN,
    Sizes,
    distance_gradients,
    distance_table,
    whole,
)

LARGEST_HEAD = 128

# Tuned on an H200, in half precision and with heads of 64: queries and keys of a tile, warps, pipeline stages
# and, where it helps, the limit of registers per thread: more programs then run per SM.
TILES: dict[str, tuple[int, ...]] = {
    "forward": (64, 32, 4, 3, 128),
    "far forward": (64, 64, 4, 2, 128),
    "queries": (64, 32, 4, 3, 128),
    "dropped queries": (64, 32, 4, 3, 168),
    "keys": (64, 64, 4, 2),
    "persistent": (64, 64, 4, 3),
}

# The same for heads of more than 64; the other kernels have small tiles.
WIDE_TILES = {"forward": (64, 64, 4, 3), "far forward": (64, 64, 4, 3), "queries": (64, 32, 4, 3)}
WIDE_TILES |= {"dropped queries": (64, 32, 4, 3), "keys": (64, 64, 4, 2)}
SMALL = (32, 32, 4, 2)

FAR = 512
"""From this many keys of a head on average, wide tiles are faster."""

# The constants that the kernel of persistent vectors has: they have no distance.
PERSISTENT_CONSTANTS = ("WIDTH", "BK", "HAS_SPANS", "RENORMALISE", "HAS_DROPOUT", "PRECISION")


class Layout(NamedTuple):
    """For every head 8 numbers: the offsets of its past and its table (`triton_kernels.py`); and sizes."""

    heads: Tensor
    table: Sizes
    longest_reach: int


class Options(NamedTuple):
    """Values that are the same for all heads."""

    ramp: int
    renormalise: bool
    first_distance: int
    dropout: float
    windows_follow_spans: bool


@cache  # never freed: a CUDA graph reads them at their address
def _layout(
    windows: tuple[int, ...], pasts: tuple[tuple[int, int], ...], batch: int, block: int, device: torch.device
) -> Layout:  # fmt: skip
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


def span_attention(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, context: AttentionContext) -> Tensor:
    """The operation of the package docstring, [B, H, T, K]."""
    dtype = q_BHTK.dtype
    if any(kv_BMXK.numel() >= 2**31 for kv_BMXK in context.past):
        raise UserError(
            "the memory of a layer is too large for the kernels: use smaller batches or micro_batches"
        )
    persistent_k_HPK, persistent_v_HPK = (
        (None, None) if context.persistent is None else (x.to(dtype).contiguous() for x in context.persistent)
    )
    content_bias_HK, position_bias_HK = context.content_bias_HK, context.position_bias_HK
    if position_bias_HK is not None and content_bias_HK is None:
        content_bias_HK = torch.zeros_like(position_bias_HK)
    position_keys = context.mapped_position_keys()  # mapped queries would be too wide for tiles
    options = Options(*(getattr(context, name) for name in Options._fields))
    with torch.autocast(q_BHTK.device.type, enabled=False):
        out: Tensor = _SpanAttention.apply(  # type: ignore[no-untyped-call]
            contiguous_rows(q_BHTK),
            contiguous_rows(k_BHTK.to(dtype)),
            contiguous_rows(v_BHTK.to(dtype)),
            None if content_bias_HK is None else content_bias_HK.float().contiguous(),
            None if position_bias_HK is None else position_bias_HK.float(),
            position_keys,
            persistent_k_HPK,
            persistent_v_HPK,
            None if context.spans is None else context.spans.float().contiguous(),
            context.filled_B,
            tuple(context.windows),
            options,
            *(kv_BMXK.to(dtype).transpose(0, 1).contiguous() for kv_BMXK in context.past),
        )
    return out


class _SpanAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, content_bias_HK: Tensor | None,
        position_bias_HK: Tensor | None, position_keys: Tensor | None, persistent_k_HPK: Tensor | None,
        persistent_v_HPK: Tensor | None, spans: Tensor | None, filled_B: Tensor | None,
        windows: tuple[int, ...], options: Options, *pasts_MBXK: Tensor,
    ) -> Tensor:  # fmt: skip
        batch, heads, block, width = q_BHTK.shape
        pasts = tuple((past_MBXK.shape[0], past_MBXK.shape[2] // 2) for past_MBXK in pasts_MBXK)
        layout = _layout(windows, pasts, batch, block, q_BHTK.device)
        past = _end_to_end(pasts_MBXK)
        out_BHTK = _like_rows(q_BHTK)
        lse_BHT = q_BHTK.new_empty(batch, heads, block, dtype=torch.float32)
        seed = new_seed(q_BHTK.device) if options.dropout > 0 else None
        position_q_BHTK = q_BHTK
        if position_bias_HK is not None:
            position_q_BHTK = q_BHTK + position_bias_HK.to(q_BHTK.dtype)[:, None]
        keys = table = None
        if position_keys is not None:
            keys = position_keys.to(q_BHTK.dtype).contiguous()
            table = distance_table(position_q_BHTK, keys, layout.heads, layout.table, options.first_distance)
        num_persistent = 0 if persistent_k_HPK is None else persistent_k_HPK.shape[1]
        far = layout.table.columns / heads + num_persistent >= FAR
        tile = _tiles("far forward" if far else "forward", q_BHTK)
        constants = _constants(q_BHTK, position_keys, spans, filled_B, options)
        kernels.forward_kernel[(triton.cdiv(block, tile["BM"]), batch * heads)](
            q_BHTK, k_BHTK, v_BHTK, past, table, persistent_k_HPK, persistent_v_HPK, content_bias_HK,
            out_BHTK, lse_BHT, layout.heads, spans, filled_B, seed,
            *strides(q_BHTK, k_BHTK, v_BHTK, out_BHTK),
            batch, heads, block, num_persistent, **_numbers(width, options), **constants,
            HAS_PERSISTENT=num_persistent > 0, WHOLE_PERSISTENT=num_persistent % tile["BN"] == 0,
            HAS_BIAS=content_bias_HK is not None, FIRST=options.first_distance, **tile,
        )  # fmt: skip
        ctx.save_for_backward(
            q_BHTK, k_BHTK, v_BHTK, past, content_bias_HK, position_q_BHTK, position_keys, keys,
            persistent_k_HPK, persistent_v_HPK, spans, filled_B, table, out_BHTK, lse_BHT, seed,
        )  # fmt: skip
        ctx.has_position_bias, ctx.layout, ctx.options = position_bias_HK is not None, layout, options
        ctx.past_shapes = [past_MBXK.shape for past_MBXK in pasts_MBXK]
        return out_BHTK

    @staticmethod
    def backward(ctx: Any, dout_BHTK: Tensor) -> tuple[Tensor | None, ...]:
        (
            q_BHTK, k_BHTK, v_BHTK, past, content_bias_HK, position_q_BHTK, position_keys, keys,
            persistent_k_HPK, persistent_v_HPK, spans, filled_B, table, out_BHTK, lse_BHT, seed,
        ) = ctx.saved_tensors  # fmt: skip
        layout, options = ctx.layout, ctx.options
        batch, heads, block, width = q_BHTK.shape
        num_persistent = 0 if persistent_k_HPK is None else persistent_k_HPK.shape[1]
        dout_BHTK = contiguous_rows(dout_BHTK)
        inner_BHT = torch.empty_like(lse_BHT)
        dtable = None if table is None else torch.empty_like(table)
        # In one tensor, as they were projected.
        dq_BHTK, dk_BHTK, dv_BHTK = _like_rows(q_BHTK, 3).chunk(3, dim=1)
        dpast = torch.empty_like(past) if any(ctx.needs_input_grad[-len(ctx.past_shapes) :]) else None
        numbers = _numbers(width, options)
        constants = _constants(q_BHTK, position_keys, spans, filled_B, options)
        tile = _tiles("dropped queries" if options.dropout > 0 else "queries", q_BHTK)
        query_tiles = triton.cdiv(block, tile["BM"])
        parts = (heads, batch, query_tiles)
        dspans = lse_BHT.new_empty(lse_BHT.shape if constants["DYNAMIC"] else parts)
        span_ends = torch.stack(torch.aminmax(spans, dim=2)) if constants["DYNAMIC"] else spans
        content_q_BHTK, dbiases = q_BHTK, None
        if content_bias_HK is not None:
            content_q_BHTK, dbiases = torch.empty_like(out_BHTK), lse_BHT.new_empty(*parts, width)
        kernels.query_gradient_kernel[(query_tiles, batch * heads)](
            q_BHTK, k_BHTK, v_BHTK, past, table, persistent_k_HPK, persistent_v_HPK, content_bias_HK,
            out_BHTK, dout_BHTK, lse_BHT, inner_BHT, layout.heads, spans, filled_B, seed,
            dq_BHTK, dtable, dspans, dbiases, content_q_BHTK,
            *strides(q_BHTK, k_BHTK, v_BHTK, out_BHTK, dout_BHTK, dq_BHTK),
            batch, heads, block, num_persistent, **numbers, **constants, **tile,
            HAS_PERSISTENT=num_persistent > 0, WHOLE_PERSISTENT=num_persistent % tile["BN"] == 0,
            HAS_BIAS=dbiases is not None, FIRST=options.first_distance,
        )  # fmt: skip
        tile = _tiles("keys", q_BHTK)
        key_tiles = triton.cdiv(block, tile["BN"])
        if dpast is not None:
            key_tiles += triton.cdiv(layout.longest_reach, tile["BN"])
        kernels.key_gradient_kernel[(key_tiles, batch * heads)](
            content_q_BHTK, k_BHTK, v_BHTK, past, table, dout_BHTK, lse_BHT, inner_BHT, layout.heads,
            spans, span_ends, filled_B, seed, dk_BHTK, dv_BHTK, past if dpast is None else dpast,
            *strides(content_q_BHTK, k_BHTK, v_BHTK, dout_BHTK, dk_BHTK, dv_BHTK),
            batch, heads, block, **numbers, **constants, **tile, FIRST=options.first_distance,
        )  # fmt: skip
        dpersistent_k = dpersistent_v = None
        if num_persistent > 0:
            tile = _tiles("persistent", q_BHTK)
            persistent_tiles = triton.cdiv(num_persistent, tile["BN"])
            most = min(batch, max(1, 1024 // (persistent_tiles * heads)))
            texts = triton.cdiv(batch, most)
            sums = q_BHTK.new_empty(
                2, triton.cdiv(batch, texts), *persistent_k_HPK.shape, dtype=torch.float32
            )
            kernels.persistent_gradient_kernel[(persistent_tiles, heads, sums.shape[1])](
                content_q_BHTK, persistent_k_HPK, persistent_v_HPK, dout_BHTK, lse_BHT, inner_BHT, seed,
                sums[0], sums[1],
                *strides(content_q_BHTK, dout_BHTK), batch, heads, block, num_persistent, texts,
                **{name: numbers[name] for name in ("scale", "threshold", "keep_scale")},
                **{name: constants[name] for name in PERSISTENT_CONSTANTS}, **tile,
            )  # fmt: skip
            dpersistent_k, dpersistent_v = sums.sum(1).to(persistent_k_HPK.dtype)
        dposition_keys = None
        if dtable is not None:
            dposition_keys = distance_gradients(
                dtable, position_q_BHTK, keys, layout.heads, layout.table, options.first_distance,
                scale=numbers["scale"], dasked_BHTK=dq_BHTK, dtype=position_keys.dtype,
            )  # fmt: skip
        dcontent_bias_HK = dposition_bias_HK = None
        if dbiases is not None:
            dcontent_bias_HK = dbiases.sum((1, 2))
            if ctx.has_position_bias:
                dposition_bias_HK = dq_BHTK.sum((0, 2), dtype=torch.float32) - dcontent_bias_HK
        if not constants["DYNAMIC"]:
            dspans = None if spans is None else dspans.sum((1, 2))
        return (
            dq_BHTK, dk_BHTK, dv_BHTK, dcontent_bias_HK, dposition_bias_HK, dposition_keys,
            dpersistent_k, dpersistent_v, dspans, None, None, None, *_cut(dpast, ctx.past_shapes),
        )  # fmt: skip


def _like_rows(x_BHTK: Tensor, times: int = 1) -> Tensor:
    """Memory for `times` such tensors, laid out as [B, T, H, K]: the next product joins the heads."""
    batch, heads, block, width = x_BHTK.shape
    return x_BHTK.new_empty(batch, block, times * heads, width).transpose(1, 2)


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors in one row: without a copy if they follow each other in memory."""
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
    """The inverse: tensors of these shapes."""
    if row is None:
        return [None] * len(shapes)
    parts = row.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _numbers(width: int, options: Options) -> dict[str, float]:
    return {
        "ramp": float(options.ramp),
        "slope": 1 / options.ramp,
        "scale": 1 / math.sqrt(width),
        "threshold": int(options.dropout * 2**32),
        "keep_scale": 1 / (1 - options.dropout),
    }


def _constants(
    q_BHTK: Tensor, position_keys: Tensor | None, spans: Tensor | None, filled_B: Tensor | None,
    options: Options,
) -> dict[str, Any]:  # fmt: skip
    width = q_BHTK.shape[-1]
    return {
        "WIDTH": width,
        "BK": max(16, triton.next_power_of_2(width)),
        "HAS_POSITIONS": position_keys is not None,
        "HAS_SPANS": spans is not None,
        "DYNAMIC": spans is not None and spans.dim() == 3,
        "RENORMALISE": options.renormalise,
        "FOLLOWS": options.windows_follow_spans and spans is not None,
        "HAS_FILLED": filled_B is not None,
        "HAS_DROPOUT": options.dropout > 0,
        "PRECISION": "ieee" if q_BHTK.dtype == torch.float32 else "tf32",
    }


def _tiles(kernel: str, q_BHTK: Tensor) -> dict[str, int]:
    names = ["BM", "BN", "num_warps", "num_stages"]
    if torch.version.hip is None:
        names.append("maxnreg")
    tiles = WIDE_TILES if q_BHTK.shape[-1] > 64 else TILES
    tile = SMALL if q_BHTK.dtype == torch.float32 else tiles.get(kernel, SMALL)
    return dict(zip(names, tile, strict=False))
