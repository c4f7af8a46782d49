"""The end of a post-norm block on a GPU, and a whole feed-forward block with such an end.

    normed_sum      y = LN(h + dropout(out))
    feed_forward    y = LN(h + dropout'(W2 dropout(relu(W1 h + b1)) + b2))

Apart from the products, most time is memory traffic. So the kernel for the gradient of the sum also computes
those of the norm's weights and of b2, and the kernel for relu and dropout that of b1. Every program sums them
for its rows, then programs are summed: the order of sums is always the same. Elements that are zero after
relu or dropout get no gradient, so of the wide layer only the input of W2 is saved. It and its gradient are
computed in place.

Shapes: N rows, D width, E inner width, P programs; BN, BD, BE, BP of a tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.kernels.hashing import kept_places, mixed, new_seed

ROW_NUMBERS, ROW_PROGRAMS = 1024, 1024
"""Norm: elements in a tile of whole rows, and programs that sum gradients."""

WIDE_ROWS, WIDE_COLUMNS, WIDE_PROGRAMS = 16, 128, 64
"""Gradient of the wide layer: its tile, and programs per column."""

PAIRS = 512
"""Wide layer: pairs of elements per program. One hash serves two elements."""

PARTS = 128
"""Sum over programs: how many at a time."""


class Norm(NamedTuple):
    """LN, and the dropout before it."""

    weight_D: Tensor
    bias_D: Tensor
    epsilon: float
    dropout: float


def normed_sum(h: Tensor, out: Tensor, norm: Norm, dtype: torch.dtype) -> Tensor:
    """The result has `dtype`; the sum is not rounded before the norm."""
    y: Tensor = _NormedSum.apply(h, out, *norm, dtype)  # type: ignore[no-untyped-call]
    return y


def feed_forward(
    h: Tensor, w1_ED: Tensor, b1_E: Tensor, w2_DE: Tensor, b2_D: Tensor, norm: Norm,
    *, dropout: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The result and both products have `dtype`."""
    weights = (w1_ED, b1_E, w2_DE, b2_D)
    y: Tensor = _FeedForward.apply(h, *weights, *norm, dropout, dtype)  # type: ignore[no-untyped-call]
    return y


class _NormedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, out: Tensor, *norm_and_dtype: Any) -> Tensor:
        norm, dtype = Norm(*norm_and_dtype[:-1]), norm_and_dtype[-1]
        h, out = h.contiguous(), out.contiguous()
        y, stats_2N, seed = _normed(h, out, norm, dtype)
        ctx.save_for_backward(h, out, norm.weight_D, stats_2N, seed)
        ctx.dropout = norm.dropout
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dh, dout, sums_3D = _norm_gradients(dy, ctx.dropout, *ctx.saved_tensors)
        return dh, dout, sums_3D[0], sums_3D[1], None, None, None


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, w1_ED: Tensor, b1_E: Tensor, w2_DE: Tensor, b2_D: Tensor, weight_D: Tensor,
        bias_D: Tensor, epsilon: float, output_dropout: float, dropout: float, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        h_ND = h.contiguous().view(-1, h.shape[-1])
        w1_ED, b1_E, w2_DE, b2_D = (part.to(dtype) for part in (w1_ED, b1_E, w2_DE, b2_D))
        x_ND = h_ND.to(dtype)
        inner_NE = torch.addmm(b1_E, x_ND, w1_ED.t())
        _relu_and_drop(inner_NE, dropout)
        out_ND = torch.addmm(b2_D, inner_NE, w2_DE.t())
        y_ND, stats_2N, seed = _normed(h_ND, out_ND, Norm(weight_D, bias_D, epsilon, output_dropout), dtype)
        ctx.save_for_backward(x_ND, w1_ED, inner_NE, w2_DE, h_ND, out_ND, weight_D, stats_2N, seed)
        ctx.dropout, ctx.output_dropout = dropout, output_dropout
        return y_ND.view(h.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, w1_ED, inner_NE, w2_DE, *of_norm = ctx.saved_tensors
        dh_ND, dout_ND, sums_3D = _norm_gradients(dy, ctx.output_dropout, *of_norm)
        wants_h, wants_w1, _, wants_w2, *_ = ctx.needs_input_grad
        dw2_DE = dout_ND.t() @ inner_NE if wants_w2 else None
        dinner_NE = dout_ND @ w2_DE
        db1_E = _relu_gradient(dinner_NE, inner_NE, ctx.dropout)
        dw1_ED = dinner_NE.t() @ x_ND if wants_w1 else None
        if wants_h and dh_ND.dtype == dinner_NE.dtype:
            dh_ND.addmm_(dinner_NE, w1_ED)  # it may be dout_ND, which is not needed any more
        elif wants_h:
            dh_ND += dinner_NE @ w1_ED
        dnorm = (sums_3D[0], sums_3D[1], None, None)
        return dh_ND.view(dy.shape), dw1_ED, db1_E, dw2_DE, sums_3D[2], *dnorm, None, None


def _normed(h: Tensor, out: Tensor, norm: Norm, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    """y, the mean and 1 / deviation of every row, and the seed of the dropout."""
    width = h.shape[-1]
    rows = h.numel() // width
    y, stats_2N = torch.empty_like(h, dtype=dtype), h.new_empty(2, rows, dtype=torch.float32)
    seed = new_seed(h.device) if norm.dropout > 0 else None
    tile = _row_tile(width)
    _norm_kernel[(max(1, triton.cdiv(rows, tile["BN"])),)](
        h, out, norm.weight_D, norm.bias_D, seed, y, stats_2N, rows, width, norm.epsilon,
        **_drops(norm.dropout, bits=32), **tile,
    )  # fmt: skip
    return y, stats_2N, seed


def _norm_gradients(
    dy: Tensor, dropout: float, h: Tensor, out: Tensor, weight_D: Tensor, stats_2N: Tensor,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dh, dout (it may be the same tensor) and three sums over rows: dweight, dbias and that of dout."""
    width = h.shape[-1]
    rows, tile = h.numel() // width, _row_tile(width)
    programs = max(1, min(ROW_PROGRAMS, triton.cdiv(rows, tile["BN"])))
    dh = torch.empty_like(h)
    dout = torch.empty_like(out) if seed is not None or out.dtype != h.dtype else dh
    sums_P3D = h.new_empty(programs, 3, width, dtype=torch.float32)
    _norm_gradient_kernel[(programs,)](
        dy.contiguous(), h, out, weight_D, seed, stats_2N, dh, dout, sums_P3D, rows, width,
        **_drops(dropout, bits=32), HAS_DOUT=dout is not dh, **tile,
    )  # fmt: skip
    return dh, dout, _total(sums_P3D)


def _relu_and_drop(inner_NE: Tensor, dropout: float) -> None:
    """In place."""
    seed = new_seed(inner_NE.device) if dropout > 0 else None
    _relu_kernel[(max(1, triton.cdiv(inner_NE.numel(), 2 * PAIRS)),)](
        inner_NE, seed, inner_NE.numel(), **_drops(dropout, bits=16), BLOCK=PAIRS
    )


def _relu_gradient(dinner_NE: Tensor, inner_NE: Tensor, dropout: float) -> Tensor:
    """In place; returns the sum over rows."""
    rows, width = inner_NE.shape
    programs = max(1, min(WIDE_PROGRAMS, triton.cdiv(rows, WIDE_ROWS)))
    sums_PE = inner_NE.new_empty(programs, width, dtype=torch.float32)
    _relu_gradient_kernel[(triton.cdiv(width, WIDE_COLUMNS), programs)](
        dinner_NE, inner_NE, sums_PE, rows, width, _drops(dropout, bits=16)["keep_scale"],
        BN=WIDE_ROWS, BE=WIDE_COLUMNS,
    )  # fmt: skip
    return _total(sums_PE)


def _total(sums_PX: Tensor) -> Tensor:
    """Over programs."""
    out = torch.empty_like(sums_PX[0])
    _total_kernel[(triton.cdiv(out.numel(), 8),)](sums_PX, out, sums_PX.shape[0], out.numel(), BP=PARTS, BD=8)
    return out


def _row_tile(width: int) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    return {"BN": max(1, ROW_NUMBERS // columns), "BD": columns, "num_warps": min(max(2, columns // 512), 16)}


def _drops(dropout: float, bits: int) -> dict[str, Any]:
    """Elements whose hash is below a threshold are dropped: the probability in this many bits."""
    threshold = int(dropout * 2**bits)
    keep_scale = 1 / (1 - threshold / 2**bits)
    return {"threshold": threshold, "keep_scale": keep_scale, "HAS_DROPOUT": dropout > 0}


@triton.jit
def _kept(n, d, SEED, threshold):
    return kept_places(mixed(n ^ tl.load(SEED)), d, threshold)


@triton.jit
def _norm_kernel(
    HIDDEN, OUT, WEIGHT, BIAS, SEED, Y, STATS, rows, width, epsilon, threshold, keep_scale,
    HAS_DROPOUT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, BD)
    inside_D = (d < width)[None, :]
    here = (n < rows)[:, None] & inside_D
    at = n[:, None].to(tl.int64) * width + d[None, :]
    x = tl.load(OUT + at, mask=here, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        x = tl.where(_kept(n, d, SEED, threshold), x * keep_scale, 0.0)
    x += tl.load(HIDDEN + at, mask=here, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / width
    x = tl.where(inside_D, x - mean[:, None], 0.0)
    one_over = tl.rsqrt(tl.sum(x * x, 1) / width + epsilon)
    weight = tl.load(WEIGHT + d, mask=d < width, other=0.0).to(tl.float32)
    bias = tl.load(BIAS + d, mask=d < width, other=0.0).to(tl.float32)
    y = x * one_over[:, None] * weight[None, :] + bias[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=here)
    tl.store(STATS + n, mean, mask=n < rows)
    tl.store(STATS + rows + n, one_over, mask=n < rows)


@triton.jit
def _norm_gradient_kernel(
    DY, HIDDEN, OUT, WEIGHT, SEED, STATS, DH, DOUT, SUMS, rows, width, threshold, keep_scale,
    HAS_DROPOUT: tl.constexpr, HAS_DOUT: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BD)
    inside_D = (d < width)[None, :]
    weight = tl.load(WEIGHT + d, mask=d < width, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros([BN, BD], tl.float32)
    dbias = tl.zeros([BN, BD], tl.float32)
    dout_sum = tl.zeros([BN, BD], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BN), tl.num_programs(0)):
        n = tile * BN + tl.arange(0, BN)
        here = (n < rows)[:, None] & inside_D
        at = n[:, None].to(tl.int64) * width + d[None, :]
        dy = tl.load(DY + at, mask=here, other=0.0).to(tl.float32)
        x = tl.load(OUT + at, mask=here, other=0.0).to(tl.float32)
        h = tl.load(HIDDEN + at, mask=here, other=0.0).to(tl.float32)
        mean = tl.load(STATS + n, mask=n < rows, other=0.0)[:, None]
        one_over = tl.load(STATS + rows + n, mask=n < rows, other=0.0)[:, None]
        if HAS_DROPOUT:
            kept = _kept(n, d, SEED, threshold)
            x = tl.where(kept, x * keep_scale, 0.0)
        x = tl.where(here, (x + h - mean) * one_over, 0.0)
        dweight += dy * x
        dbias += dy
        dx = dy * weight
        along = tl.sum(dx * x, 1) / width
        dx = tl.where(here, (dx - tl.sum(dx, 1)[:, None] / width - x * along[:, None]) * one_over, 0.0)
        tl.store(DH + at, dx.to(DH.dtype.element_ty), mask=here)
        if HAS_DROPOUT:
            dx = tl.where(kept, dx * keep_scale, 0.0)
        dout_sum += dx
        if HAS_DOUT:
            tl.store(DOUT + at, dx.to(DOUT.dtype.element_ty), mask=here)
    at = SUMS + tl.program_id(0) * 3 * width + d
    tl.store(at, tl.sum(dweight, 0), mask=d < width)
    tl.store(at + width, tl.sum(dbias, 0), mask=d < width)
    tl.store(at + 2 * width, tl.sum(dout_sum, 0), mask=d < width)


@triton.jit
def _relu_kernel(
    X, SEED, numbers, threshold, keep_scale, HAS_DROPOUT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    at, left = X + 2 * first + i, numbers - 2 * first
    a = tl.load(at, mask=i < left, other=0.0).to(tl.float32)
    b = tl.load(at + BLOCK, mask=i + BLOCK < left, other=0.0).to(tl.float32)
    a = tl.where(a <= 0.0, 0.0, a)
    b = tl.where(b <= 0.0, 0.0, b)
    if HAS_DROPOUT:
        bits = mixed((first.to(tl.uint32) + i.to(tl.uint32)) ^ tl.load(SEED).to(tl.uint32))
        least = tl.cast(threshold, tl.uint32)
        a = tl.where((bits & 0xFFFF) >= least, a * keep_scale, 0.0)
        b = tl.where((bits >> 16) >= least, b * keep_scale, 0.0)
    tl.store(at, a.to(X.dtype.element_ty), mask=i < left)
    tl.store(at + BLOCK, b.to(X.dtype.element_ty), mask=i + BLOCK < left)


@triton.jit
def _relu_gradient_kernel(
    DINNER, INNER, SUMS, rows, width, keep_scale, BN: tl.constexpr, BE: tl.constexpr
):  # fmt: skip
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    sums = tl.zeros([BN, BE], tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(rows, BN), tl.num_programs(1)):
        n = tile * BN + tl.arange(0, BN)
        here = (n < rows)[:, None] & (e < width)[None, :]
        at = n[:, None].to(tl.int64) * width + e[None, :]
        inner = tl.load(INNER + at, mask=here, other=0.0)
        d = tl.load(DINNER + at, mask=here, other=0.0).to(tl.float32)
        d = tl.where(inner <= 0.0, 0.0, d * keep_scale)
        tl.store(DINNER + at, d.to(DINNER.dtype.element_ty), mask=here)
        sums += d
    tl.store(SUMS + tl.program_id(1) * width + e, tl.sum(sums, 0), mask=e < width)


@triton.jit
def _total_kernel(SUMS, OUT, parts, width, BP: tl.constexpr, BD: tl.constexpr):
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    total = tl.zeros([BP, BD], tl.float32)
    for start in range(0, parts, BP):
        p = start + tl.arange(0, BP)
        here = (p < parts)[:, None] & (d < width)[None, :]
        total += tl.load(SUMS + p[:, None] * width + d[None, :], mask=here, other=0.0)
    tl.store(OUT + d, tl.sum(total, 0), mask=d < width)
