"""QK-norm and RoPE as Triton kernels: one pass over the memory; angles and norms are not stored.

A program has some positions of one text and loops over its heads: query, key and value of a head are loaded
together. Angles are computed in float64 and reduced to one rotation, everything else in float32. Keys and
values are written in the layout of the memory, position-major. The backward kernel rotates back and
computes the norms again. The gradient of a gain is summed by every program for its positions, and then over
programs: the order of sums is always the same.

Shapes: as in the package; BT positions of a tile, E half a row rounded up, BE the same as a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.kernels.layout import contiguous_rows, strides
from longspan.kernels.qk_norm_rope.eager import EPSILON, PURE, QKV, Mix, Rope, speeds

TAU = tl.constexpr(2 * math.pi)
POSITIONS = 32
PROGRAMS = 2048
"""With fewer tiles of positions than this, heads are divided among programs to fill the GPU."""


def qk_norm_rope(
    rows_BTRK: Tensor,
    heads: int,
    gain_H: Tensor | None,
    first_B: Tensor | None,
    rope: Rope,
    mix: Mix = PURE,
) -> QKV:
    turns_E = None if first_B is None else _turns(rows_BTRK.shape[-1] // 2, rope, rows_BTRK.device)
    rows_BTRK = contiguous_rows(rows_BTRK)
    mixed = [None if x is None else x.contiguous() for x in mix]
    return QKV(*_QKNormRope.apply(rows_BTRK, gain_H, first_B, turns_E, heads, *mixed))  # type: ignore[no-untyped-call]


@cache  # never freed: a CUDA graph reads them at their address
def _turns(pairs: int, rope: Rope, device: torch.device) -> Tensor:
    """The part of a full rotation that each pair makes from one position to the next."""
    with torch.inference_mode(False):  # the first call may be in inference mode, a later one in training
        return speeds(pairs, rope, device) / (2 * math.pi)


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_BTRK: Tensor,
        gain_H: Tensor | None,
        first_B: Tensor | None,
        turns_E: Tensor | None,
        heads: int,
        *mixed: Tensor | None,
    ) -> tuple[Tensor, ...]:
        batch, block, rows, width = rows_BTRK.shape
        q_BTHK = rows_BTRK.new_empty(batch, block, rows - 2 * heads, width)
        kv_BTXK = rows_BTRK.new_empty(block, batch, 2 * heads, width).transpose(0, 1)
        k_BTHK, v_BTHK = kv_BTXK.split(heads, dim=2)
        ctx.save_for_backward(rows_BTRK, gain_H, first_B, turns_E, *mixed)
        ctx.set_materialize_grads(False)
        ctx.heads = heads
        if rows_BTRK.numel():
            forward_kernel[_grid(rows_BTRK, heads)](
                rows_BTRK, q_BTHK, k_BTHK, v_BTHK, gain_H, first_B, turns_E, *mixed,
                *strides(rows_BTRK, q_BTHK, k_BTHK), **_sizes(rows_BTRK, heads, gain_H, first_B, mixed),
            )  # fmt: skip
        return q_BTHK, k_BTHK, v_BTHK, kv_BTXK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dkv_BTXK: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        rows_BTRK, gain_H, first_B, turns_E, *mixed = ctx.saved_tensors
        heads, queries = ctx.heads, rows_BTRK.shape[2] - 2 * ctx.heads
        later_k, later_v = (None, None) if dkv_BTXK is None else dkv_BTXK.split(heads, dim=2)
        dq_BTHK = _sum_of(rows_BTRK[:, :, :queries], dq)
        dk_BTHK = _sum_of(rows_BTRK[:, :, :heads], dk, later_k)
        dv_BTHK = _sum_of(rows_BTRK[:, :, :heads], dv, later_v)
        drows_BTRK = torch.empty_like(rows_BTRK)
        dmixed = [None if x is None else torch.empty_like(x) for x in mixed]
        grid = _grid(rows_BTRK, heads)
        dgain_HN = rows_BTRK.new_empty(heads, grid[0] * grid[1], dtype=torch.float32)
        if rows_BTRK.numel():
            gradient_kernel[grid](
                rows_BTRK, dq_BTHK, dk_BTHK, dv_BTHK, drows_BTRK, dgain_HN, gain_H, first_B, turns_E,
                *mixed, *dmixed, *strides(rows_BTRK, dq_BTHK, dk_BTHK, dv_BTHK, drows_BTRK),
                **_sizes(rows_BTRK, heads, gain_H, first_B, mixed),
            )  # fmt: skip
        dgain_H = None if gain_H is None or queries == 0 else dgain_HN.sum(1).to(gain_H.dtype)
        return drows_BTRK, dgain_H, None, None, None, *dmixed


def _sum_of(like: Tensor, *gradients: Tensor | None) -> Tensor:
    """The sum of all gradients that are not None; zeros if there are none."""
    there = [gradient for gradient in gradients if gradient is not None]
    return contiguous_rows(sum(there[1:], start=there[0]) if there else torch.zeros_like(like))


def _grid(rows_BTRK: Tensor, heads: int) -> tuple[int, int, int]:
    batch, tiles = rows_BTRK.shape[0], triton.cdiv(rows_BTRK.shape[1], POSITIONS)
    return tiles, batch, max(1, min(heads, PROGRAMS // max(1, tiles * batch)))


def _sizes(
    rows_BTRK: Tensor,
    heads: int,
    gain_H: Tensor | None,
    first_B: Tensor | None,
    mixed: Sequence[Tensor | None],
) -> dict[str, int | bool]:
    value_BTHK, _, before_B1H2S = mixed
    block, rows, width = rows_BTRK.shape[1:]
    half = triton.cdiv(width, 2)
    return {
        "T": block,
        "H": heads,
        "WIDTH": width,
        "E": half,
        "BE": triton.next_power_of_2(half),
        "BT": POSITIONS,
        "HAS_QUERIES": rows > 2 * heads,
        "NORMED": gain_H is not None,
        "ROTATED": first_B is not None,
        "HAS_VALUE": value_BTHK is not None,
        "STILL": 0 if before_B1H2S is None else before_B1H2S.shape[-1],
        "EPSILON": EPSILON,
    }


@triton.jit
def _angles(FIRST, TURNS, b, t, e, E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Cosine and sine of every position and pair."""
    position = (tl.load(FIRST + b) + t).to(tl.float64)
    turns = position[:, None] * tl.load(TURNS + e, mask=e < E, other=0.0)[None, :]
    angle = ((turns - tl.floor(turns)) * TAU).to(tl.float32)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def _halves(at, in_left, in_right, E: tl.constexpr):  # type: ignore[no-untyped-def]
    left = tl.load(at, mask=in_left, other=0.0).to(tl.float32)
    return left, tl.load(at + E, mask=in_right, other=0.0).to(tl.float32)


@triton.jit
def _still(BEFORE, place, t, e, E: tl.constexpr, STILL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which pairs of a key come from the position before, those that have none, and where these are."""
    still = (e >= E - STILL)[None, :] & (t >= 0)[:, None]
    at = BEFORE + place * 2 * STILL + (e - E + STILL)[None, :] + tl.zeros_like(t)[:, None]
    return still, still & (t == 0)[:, None], at


@triton.jit
def _key(row_at, r_t, BEFORE, place, t, e, in_left, in_right, E: tl.constexpr, STILL: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of keys, or of queries with STILL = 0: the last STILL pairs are those of the position before."""
    if STILL == 0:
        left, right = _halves(row_at, in_left, in_right, E)
    else:
        still, first, at = _still(BEFORE, place, t, e, E, STILL)
        left, right = _halves(row_at - tl.where(still, r_t, 0), in_left & ~first, in_right & ~first, E)
        before_left, before_right = _halves(at, in_left & first, in_right & first, STILL)
        left, right = left + before_left, right + before_right
    return left, right


@triton.jit
def _write(at, left, right, in_left, in_right, E: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(at, left.to(at.dtype.element_ty), mask=in_left)
    tl.store(at + E, right.to(at.dtype.element_ty), mask=in_right)


@triton.jit
def _one_over_rms(left, right, WIDTH: tl.constexpr, EPSILON: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.rsqrt(tl.sum(left * left + right * right, 1) / WIDTH + EPSILON)[:, None]


@triton.jit
def _before_norm(left, right, dleft, dright, r, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The gradient of x from that of x r, and the inner product of x r with the latter, for every row."""
    left, right = left * r, right * r
    inner = tl.sum(left * dleft + right * dright, 1)
    mean = (inner / WIDTH)[:, None]
    return r * (dleft - left * mean), r * (dright - right * mean), inner


@triton.jit
def _tile(T, WIDTH: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's text, positions and pairs, which of them exist, and positions as int64 for offsets."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    in_left = (t < T)[:, None] & (e < E)[None, :]
    in_right = (t < T)[:, None] & (e + E < WIDTH)[None, :]
    return tl.program_id(1).to(tl.int64), t, e, in_left, in_right, t[:, None].to(tl.int64)


@triton.jit
def forward_kernel(  # type: ignore[no-untyped-def]
    ROWS, Q, KEYS, VALUES, GAIN, FIRST, TURNS, VALUE, GATE, BEFORE,
    r_b, r_t, r_h, q_b, q_t, q_h, k_b, k_t, k_h, T, H,
    WIDTH: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr, HAS_QUERIES: tl.constexpr,
    NORMED: tl.constexpr, ROTATED: tl.constexpr, HAS_VALUE: tl.constexpr, STILL: tl.constexpr,
    EPSILON: tl.constexpr,
):  # fmt: skip
    b, t, e, in_left, in_right, long_t = _tile(T, WIDTH, E, BE, BT)
    if ROTATED:
        cos, sin = _angles(FIRST, TURNS, b, t, e, E)
    row_at = ROWS + b * r_b + long_t * r_t + e[None, :]
    q_at = Q + b * q_b + long_t * q_t + e[None, :]
    k_at = KEYS + b * k_b + long_t * k_t + e[None, :]
    v_at = VALUES + b * k_b + long_t * k_t + e[None, :]
    key_row = H if HAS_QUERIES else 0
    for h in range(tl.program_id(2), H, tl.num_programs(2)):
        for keys in tl.static_range(1 - HAS_QUERIES, 2):  # queries, then keys
            x_at = row_at + (keys * key_row + h) * r_h
            left, right = _key(x_at, r_t, BEFORE, b * H + h, t, e, in_left, in_right, E, keys * STILL)
            if NORMED:
                r = _one_over_rms(left, right, WIDTH, EPSILON)
                if not keys:
                    r *= tl.load(GAIN + h).to(tl.float32)
                left, right = left * r, right * r
            if ROTATED:
                left, right = left * cos - right * sin, left * sin + right * cos
            _write(k_at + h * k_h if keys else q_at + h * q_h, left, right, in_left, in_right, E)
        left, right = _halves(row_at + (key_row + H + h) * r_h, in_left, in_right, E)
        if HAS_VALUE:
            place = (b * T + long_t) * H + h
            gate = 2 * tl.load(GATE + place, mask=(t < T)[:, None], other=0.0).to(tl.float32)
            more_left, more_right = _halves(VALUE + place * WIDTH + e[None, :], in_left, in_right, E)
            left, right = left + gate * more_left, right + gate * more_right
        _write(v_at + h * k_h, left, right, in_left, in_right, E)


@triton.jit
def gradient_kernel(  # type: ignore[no-untyped-def]
    ROWS, DQ, DKEYS, DVALUES, DROWS, DGAIN, GAIN, FIRST, TURNS, VALUE, GATE, BEFORE, DVALUE, DGATE, DBEFORE,
    r_b, r_t, r_h, q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, d_b, d_t, d_h, T, H,
    WIDTH: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr, HAS_QUERIES: tl.constexpr,
    NORMED: tl.constexpr, ROTATED: tl.constexpr, HAS_VALUE: tl.constexpr, STILL: tl.constexpr,
    EPSILON: tl.constexpr,
):  # fmt: skip
    b, t, e, in_left, in_right, long_t = _tile(T, WIDTH, E, BE, BT)
    if ROTATED:
        cos, sin = _angles(FIRST, TURNS, b, t, e, E)
    row_at = ROWS + b * r_b + long_t * r_t + e[None, :]
    dq_at = DQ + b * q_b + long_t * q_t + e[None, :]
    dk_at = DKEYS + b * k_b + long_t * k_t + e[None, :]
    dv_at = DVALUES + b * v_b + long_t * v_t + e[None, :]
    drow_at = DROWS + b * d_b + long_t * d_t + e[None, :]
    dgain_at = DGAIN + b * tl.num_programs(0) + tl.program_id(0)
    programs = tl.num_programs(0) * tl.num_programs(1)
    key_row = H if HAS_QUERIES else 0
    for h in range(tl.program_id(2), H, tl.num_programs(2)):
        for keys in tl.static_range(1 - HAS_QUERIES, 2):  # queries, then keys
            left, right = _halves(dk_at + h * k_h if keys else dq_at + h * q_h, in_left, in_right, E)
            if ROTATED:
                left, right = left * cos + right * sin, right * cos - left * sin
            if NORMED:
                x_at = row_at + (keys * key_row + h) * r_h
                x_left, x_right = _key(x_at, r_t, BEFORE, b * H + h, t, e, in_left, in_right, E, keys * STILL)
                r = _one_over_rms(x_left, x_right, WIDTH, EPSILON)
                left, right, inner = _before_norm(x_left, x_right, left, right, r, WIDTH)
                if not keys:
                    gain = tl.load(GAIN + h).to(tl.float32)
                    left, right = left * gain, right * gain
                    tl.store(dgain_at + h * programs, tl.sum(inner, 0))
            dx_at = drow_at + (keys * key_row + h) * d_h
            if keys * STILL == 0:
                _write(dx_at, left, right, in_left, in_right, E)
            else:
                still, first, at = _still(DBEFORE, b * H + h, t, e, E, STILL)
                to = dx_at - tl.where(still, d_t, 0)
                _write(to, left, right, in_left & ~first, in_right & ~first, E)
                _write(at, left, right, in_left & first, in_right & first, STILL)
                # These pairs of the last position belong to the next block.
                last = still & (t == T - 1)[:, None]
                _write(dx_at, left * 0, right * 0, in_left & last, in_right & last, E)
        left, right = _halves(dv_at + h * v_h, in_left, in_right, E)
        _write(drow_at + (key_row + H + h) * d_h, left, right, in_left, in_right, E)
        if HAS_VALUE:
            place = (b * T + long_t) * H + h
            gate = 2 * tl.load(GATE + place, mask=(t < T)[:, None], other=0.0).to(tl.float32)
            more_left, more_right = _halves(VALUE + place * WIDTH + e[None, :], in_left, in_right, E)
            dgate = 2 * tl.sum(left * more_left + right * more_right, 1)[:, None]
            tl.store(DGATE + place, dgate.to(DGATE.dtype.element_ty), mask=(t < T)[:, None])
            _write(DVALUE + place * WIDTH + e[None, :], gate * left, gate * right, in_left, in_right, E)
