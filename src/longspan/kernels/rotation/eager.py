"""The rotation in plain torch. Shapes: as in the package, E = K / 2."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_BTHK: Tensor, first_B: Tensor, base: float) -> Tensor:
    left, right = x_BTHK.chunk(2, dim=-1)
    position_BT = first_B[:, None] + torch.arange(x_BTHK.shape[1], device=x_BTHK.device)
    angle_BTE = position_BT[..., None] * speeds(left.shape[-1], base, x_BTHK.device)
    angle_BT1E = angle_BTE[:, :, None]
    cos, sin = angle_BT1E.cos().to(x_BTHK.dtype), angle_BT1E.sin().to(x_BTHK.dtype)
    turned = torch.addcmul(left * cos, right, sin, value=-1), torch.addcmul(right * cos, left, sin)
    return torch.cat(turned, dim=-1)


def speeds(pairs: int, base: float, device: torch.device) -> Tensor:
    """By how much each pair turns from one position to the next, [E], float64."""
    pair_E = torch.arange(pairs, device=device, dtype=torch.float64)
    return base ** (-pair_E / pairs)
