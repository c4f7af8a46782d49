"""The specification: row by row, and every pair as a complex number."""

from __future__ import annotations

import cmath
import math

import torch
from torch import Tensor

from longspan.kernels.qk_norm_rope.eager import EPSILON, QKV, Rope


def qk_norm_rope(
    rows_BTRK: Tensor, heads: int, gain_H: Tensor | None, first_B: Tensor | None, rope: Rope
) -> QKV:
    out_BTRK = rows_BTRK.clone()
    queries = rows_BTRK.shape[2] - 2 * heads
    for b in range(rows_BTRK.shape[0]):
        for t in range(rows_BTRK.shape[1]):
            for r in range(queries + heads):
                row = rows_BTRK[b, t, r].tolist()
                if gain_H is not None:
                    gain = gain_H[r].item() if r < queries else 1.0
                    row = _normed(row, gain)
                if first_B is not None:
                    row = _rotated(row, int(first_B[b]) + t, rope)
                out_BTRK[b, t, r] = torch.tensor(row)
    kv_BTXK = out_BTRK[:, :, queries:]
    return QKV(out_BTRK[:, :, :queries], kv_BTXK[:, :, :heads], kv_BTXK[:, :, heads:], kv_BTXK)


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
