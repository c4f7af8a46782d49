"""The specification: row by row, and every pair as a complex number."""

from __future__ import annotations

import cmath
import itertools
import math

import torch
from torch import Tensor

from longspan.kernels.qk_norm_rope.eager import EPSILON, PURE, QKV, Mix, Rope


def qk_norm_rope(
    rows_BTRK: Tensor,
    heads: int,
    gain_H: Tensor | None,
    first_B: Tensor | None,
    rope: Rope,
    mix: Mix = PURE,
) -> QKV:
    queries = rows_BTRK.shape[2] - 2 * heads
    rows_BTRK = _mixed(rows_BTRK, queries, heads, mix)
    out_BTRK = rows_BTRK.clone()
    for b, t, r in itertools.product(*map(range, (*rows_BTRK.shape[:2], queries + heads))):
        row = rows_BTRK[b, t, r].tolist()
        if gain_H is not None:
            row = _normed(row, gain_H[r].item() if r < queries else 1.0)
        if first_B is not None:
            row = _rotated(row, int(first_B[b]) + t, rope)
        out_BTRK[b, t, r] = torch.tensor(row)
    kv_BTXK = out_BTRK[:, :, queries:]
    return QKV(out_BTRK[:, :, :queries], kv_BTXK[:, :, :heads], kv_BTXK[:, :, heads:], kv_BTXK)


def _mixed(rows_BTRK: Tensor, queries: int, heads: int, mix: Mix) -> Tensor:
    out_BTRK = rows_BTRK.clone()
    for b, t, h in itertools.product(*map(range, (*rows_BTRK.shape[:2], heads))):
        if mix.value_BTHK is not None and mix.gate_BTH is not None:
            out_BTRK[b, t, queries + heads + h] += 2 * mix.gate_BTH[b, t, h] * mix.value_BTHK[b, t, h]
        if mix.before_B1H2S is not None:
            still, half = mix.before_B1H2S.shape[-1], rows_BTRK.shape[-1] // 2
            for i, p in itertools.product((0, 1), range(still)):
                column = (i + 1) * half - still + p
                earlier = rows_BTRK[b, t - 1, queries + h, column] if t else mix.before_B1H2S[b, 0, h, i, p]
                out_BTRK[b, t, queries + h, column] = earlier
    return out_BTRK


def _normed(row: list[float], gain: float) -> list[float]:
    rms = math.sqrt(sum(x * x for x in row) / len(row) + EPSILON)
    return [gain * x / rms for x in row]


def _rotated(row: list[float], position: int, rope: Rope) -> list[float]:
    pairs = len(row) // 2
    rotated = max(1, round(rope.fraction * pairs))
    after = [complex(row[i], row[i + pairs]) for i in range(pairs)]
    for i in range(rotated):
        after[i] *= cmath.exp(1j * position * rope.base ** (-i / rotated))
    return [z.real for z in after] + [z.imag for z in after]
