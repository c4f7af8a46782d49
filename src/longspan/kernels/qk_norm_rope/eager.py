"""QK-norm and RoPE in plain torch. Shapes: as in the package, E = K / 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.kernels.layout import contiguous_split

EPSILON = 1e-6


class Rope(NamedTuple):
    """Which pairs of a head are rotated, and how fast."""

    base: float = 10000.0
    fraction: float = 1.0


class QKV(NamedTuple):
    """Queries (or none), keys and values, and keys and values packed as the memory stores them."""

    q_BTHK: Tensor
    k_BTHK: Tensor
    v_BTHK: Tensor
    kv_BTXK: Tensor


def qk_norm_rope(
    rows_BTRK: Tensor, heads: int, gain_H: Tensor | None, first_B: Tensor | None, rope: Rope
) -> QKV:
    if gain_H is not None or first_B is not None:
        block, width = rows_BTRK.shape[1], rows_BTRK.shape[3]
        angles = None if first_B is None else cos_sin(first_B, block, width, rope, rows_BTRK.dtype)
        parts = rows_BTRK.split([rows_BTRK.shape[2] - 2 * heads, heads, heads], dim=2)
        rows_BTRK = normed_rotated(parts, gain_H, angles)
    return split_rows(rows_BTRK, heads)


def split_rows(rows_BTRK: Tensor, heads: int) -> QKV:
    """Rows that are normed and rotated already."""
    queries = rows_BTRK.shape[2] - 2 * heads
    q_BTHK, k_BTHK, v_BTHK = contiguous_split(rows_BTRK, [queries, heads, heads], dim=2)
    return QKV(q_BTHK, k_BTHK, v_BTHK, rows_BTRK[:, :, queries:])


def normed_rotated(
    parts: Sequence[Tensor], gain_H: Tensor | None, angles: tuple[Tensor, Tensor] | None
) -> Tensor:
    """The rows of queries and keys normed and rotated, and those of values, [B, T, R, K]."""
    q_BTHK, k_BTHK, v_BTHK = parts
    if gain_H is not None:
        gain_H1 = gain_H[: q_BTHK.shape[2], None].to(q_BTHK.dtype)
        q_BTHK, k_BTHK = _normed(q_BTHK) * gain_H1, _normed(k_BTHK)
    if angles is not None:
        q_BTHK, k_BTHK = _rotated(q_BTHK, *angles), _rotated(k_BTHK, *angles)
    return torch.cat([q_BTHK, k_BTHK, v_BTHK], dim=2)


def _normed(x_BTHK: Tensor) -> Tensor:
    return F.rms_norm(x_BTHK, x_BTHK.shape[-1:], eps=EPSILON).to(x_BTHK.dtype)


def cos_sin(first_B: Tensor, block: int, width: int, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, [B, T, 1, E]."""
    position_BT = first_B[:, None] + torch.arange(block, device=first_B.device)
    angle_BTE = position_BT[..., None] * speeds(width // 2, rope, first_B.device)
    angle_BT1E = angle_BTE[:, :, None]
    return angle_BT1E.cos().to(dtype), angle_BT1E.sin().to(dtype)


def _rotated(x_BTHK: Tensor, cos_BT1E: Tensor, sin_BT1E: Tensor) -> Tensor:
    left, right = x_BTHK.chunk(2, dim=-1)
    rotated_left = torch.addcmul(left * cos_BT1E, right, sin_BT1E, value=-1)
    return torch.cat([rotated_left, torch.addcmul(right * cos_BT1E, left, sin_BT1E)], dim=-1).to(x_BTHK.dtype)


def rotated_pairs(pairs: int, fraction: float) -> int:
    """How many of a head's pairs are rotated."""
    return max(1, round(fraction * pairs))


def speeds(pairs: int, rope: Rope, device: torch.device) -> Tensor:
    """The angle between positions for each pair, [E], float64."""
    rotated = rotated_pairs(pairs, rope.fraction)
    pair_E = torch.arange(pairs, device=device, dtype=torch.float64)
    return torch.where(pair_E < rotated, rope.base ** (-pair_E / rotated), 0.0)
