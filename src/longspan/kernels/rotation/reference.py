"""The specification: every pair as a complex number."""

from __future__ import annotations

import cmath

import torch
from torch import Tensor


def rotate(x_BTHK: Tensor, first_B: Tensor, base: float) -> Tensor:
    out_BTHK = torch.empty_like(x_BTHK)
    pairs = x_BTHK.shape[-1] // 2
    for b, first in enumerate(first_B.tolist()):
        for t in range(x_BTHK.shape[1]):
            for h in range(x_BTHK.shape[2]):
                for i in range(pairs):
                    pair = complex(x_BTHK[b, t, h, i], x_BTHK[b, t, h, i + pairs])
                    turned = pair * cmath.exp(1j * (first + t) * base ** (-i / pairs))
                    out_BTHK[b, t, h, i], out_BTHK[b, t, h, i + pairs] = turned.real, turned.imag
    return out_BTHK
