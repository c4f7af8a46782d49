"""QK-norm and RoPE in plain torch. Shapes: as in the package, E = K / 2."""

from __future__ import annotations

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


class Mix(NamedTuple):
    """What is mixed into the rows first."""

    value_BTHK: Tensor | None = None
    gate_BTH: Tensor | None = None
    """Values get 2 gate `value`."""
    before_B1H2S: Tensor | None = None
    """The last S pairs of a key are those of the position before (here: before the first one).

    A query that matches them finds what followed an earlier token.
    """


PURE = Mix()


def qk_norm_rope(
    rows_BTRK: Tensor,
    heads: int,
    gain_H: Tensor | None,
    first_B: Tensor | None,
    rope: Rope,
    mix: Mix = PURE,
) -> QKV:
    sizes = [rows_BTRK.shape[2] - 2 * heads, heads, heads]
    if any(x is not None for x in mix):
        rows_BTRK = _mixed(rows_BTRK, sizes, mix)
    q_BTHK, k_BTHK, v_BTHK = contiguous_split(rows_BTRK, sizes, dim=2)
    if gain_H is None and first_B is None:
        return QKV(q_BTHK, k_BTHK, v_BTHK, rows_BTRK[:, :, q_BTHK.shape[2] :])
    if gain_H is not None:
        gain_H1 = gain_H[: q_BTHK.shape[2], None].to(q_BTHK.dtype)
        q_BTHK, k_BTHK = _normed(q_BTHK) * gain_H1, _normed(k_BTHK)
    if first_B is not None:
        angles = _angles(rows_BTRK, first_B, rope)
        q_BTHK, k_BTHK = _rotated(q_BTHK, *angles), _rotated(k_BTHK, *angles)
    return QKV(q_BTHK, k_BTHK, v_BTHK, torch.cat([k_BTHK, v_BTHK], dim=2))


def _mixed(rows_BTRK: Tensor, sizes: list[int], mix: Mix) -> Tensor:
    q_BTHK, k_BTHK, v_BTHK = rows_BTRK.split(sizes, dim=2)
    if mix.before_B1H2S is not None:
        k_BTH2E, still = torch.unflatten(k_BTHK, -1, (2, -1)), mix.before_B1H2S.shape[-1]
        earlier_BTH2S = torch.cat([mix.before_B1H2S.to(k_BTHK.dtype), k_BTH2E[:, :-1, ..., -still:]], dim=1)
        k_BTHK = torch.cat([k_BTH2E[..., :-still], earlier_BTH2S], dim=-1).flatten(-2)
    if mix.value_BTHK is not None and mix.gate_BTH is not None:
        v_BTHK = v_BTHK + (2 * mix.gate_BTH[..., None] * mix.value_BTHK).to(v_BTHK.dtype)
    return torch.cat([q_BTHK, k_BTHK, v_BTHK], dim=2)


def _normed(x_BTHK: Tensor) -> Tensor:
    return F.rms_norm(x_BTHK, x_BTHK.shape[-1:], eps=EPSILON).to(x_BTHK.dtype)


def _angles(rows_BTRK: Tensor, first_B: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, [B, T, 1, E]."""
    position_BT = first_B[:, None] + torch.arange(rows_BTRK.shape[1], device=rows_BTRK.device)
    angle_BTE = position_BT[..., None] * speeds(rows_BTRK.shape[-1] // 2, rope, rows_BTRK.device)
    angle_BT1E = angle_BTE[:, :, None]
    return angle_BT1E.cos().to(rows_BTRK.dtype), angle_BT1E.sin().to(rows_BTRK.dtype)


def _rotated(x_BTHK: Tensor, cos_BT1E: Tensor, sin_BT1E: Tensor) -> Tensor:
    left, right = x_BTHK.chunk(2, dim=-1)
    rotated_left = torch.addcmul(left * cos_BT1E, right, sin_BT1E, value=-1)
    return torch.cat([rotated_left, torch.addcmul(right * cos_BT1E, left, sin_BT1E)], dim=-1)


def rotated_pairs(pairs: int, fraction: float) -> int:
    """How many of a head's pairs are rotated."""
    return max(1, round(fraction * pairs))


def speeds(pairs: int, rope: Rope, device: torch.device) -> Tensor:
    """The angle between positions for each pair, [E], float64."""
    rotated = rotated_pairs(pairs, rope.fraction)
    pair_E = torch.arange(pairs, device=device, dtype=torch.float64)
    return torch.where(pair_E < rotated, rope.base ** (-pair_E / rotated), 0.0)
