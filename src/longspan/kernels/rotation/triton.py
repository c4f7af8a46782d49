"""The rotation as a Triton kernel: what is read once is written once, and angles are never stored.

A program turns some rows of all heads: it makes their angles in float64, takes away whole turns, and goes on
in float32. The gradient is turned back by the same kernel. Shapes: as in the package, E = K / 2; BT rows of a
tile, BE the pairs rounded up.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.kernels.rotation.eager import speeds

TAU = tl.constexpr(2 * math.pi)
ROWS = 32


def rotate(x_BTHK: Tensor, first_B: Tensor, base: float) -> Tensor:
    turns_E = speeds(x_BTHK.shape[-1] // 2, base, x_BTHK.device) / (2 * math.pi)
    return _Rotation.apply(x_BTHK, first_B, turns_E)  # type: ignore[no-untyped-call]


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTHK: Tensor, first_B: Tensor, turns_E: Tensor) -> Tensor:
        ctx.save_for_backward(first_B, turns_E)
        return _launch(x_BTHK, first_B, turns_E, sign=1.0)

    @staticmethod
    def backward(ctx: Any, dout_BTHK: Tensor) -> tuple[Tensor, None, None]:
        first_B, turns_E = ctx.saved_tensors
        return _launch(dout_BTHK, first_B, turns_E, sign=-1.0), None, None


def _launch(x_BTHK: Tensor, first_B: Tensor, turns_E: Tensor, sign: float) -> Tensor:
    x_BTHK = x_BTHK if x_BTHK.stride(-1) == 1 else x_BTHK.contiguous()
    out_BTHK = torch.empty(x_BTHK.shape, dtype=x_BTHK.dtype, device=x_BTHK.device)
    batch, block, heads, width = x_BTHK.shape
    if x_BTHK.numel():
        rotation_kernel[(triton.cdiv(block, ROWS), batch)](
            x_BTHK, out_BTHK, first_B, turns_E, *x_BTHK.stride()[:3], *out_BTHK.stride()[:3],
            block, heads, sign, E=width // 2, BE=triton.next_power_of_2(width // 2), BT=ROWS,
        )  # fmt: skip
    return out_BTHK


@triton.jit
def rotation_kernel(  # type: ignore[no-untyped-def]
    X, OUT, FIRST, TURNS, x_b, x_t, x_h, o_b, o_t, o_h, T, H, sign,
    E: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    inside = (t < T)[:, None] & (e < E)[None, :]
    position = (tl.load(FIRST + b) + t).to(tl.float64)
    turns = position[:, None] * tl.load(TURNS + e, mask=e < E, other=0.0)[None, :]
    angle = ((turns - tl.floor(turns)) * TAU).to(tl.float32)
    cos, sin = tl.cos(angle), tl.sin(angle) * sign
    x_at = X + b * x_b + t[:, None].to(tl.int64) * x_t + e[None, :]
    out_at = OUT + b * o_b + t[:, None].to(tl.int64) * o_t + e[None, :]
    for h in range(H):
        left = tl.load(x_at + h * x_h, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(x_at + h * x_h + E, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_at + h * o_h, (left * cos - right * sin).to(OUT.dtype.element_ty), mask=inside)
        tl.store(out_at + h * o_h + E, (left * sin + right * cos).to(OUT.dtype.element_ty), mask=inside)
