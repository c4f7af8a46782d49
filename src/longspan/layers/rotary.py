"""Rotary positions. Shapes: B batch, T positions, X any, K head width, E = K / 2."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.layers.positions import Positions, Terms


class RotaryPositions(Positions):
    """RoPE (Su et al., 2021): position n turns the pair (x_i, x_{i+E}) of a query or key by n base^(-i/E).

    A query at m and a key at n then multiply to what depends on the content and on m - n alone: so any span,
    memory and length of text will do. Positions are counted from the beginning of the text, so what is
    remembered was turned once and for all; angles are computed in float64, exact however long the text is.
    """

    shared = False
    counts = True

    def __init__(self, base: float = 10000.0) -> None:
        super().__init__()
        self.base = base

    def terms(self, q_BHTK: Tensor, window: int, heads: list[int]) -> Terms:
        return Terms(q_BHTK, None, None)

    def placed(self, x: Tensor, first_B: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        block, pairs = x.shape[1], left.shape[-1]
        position_BT = first_B[:, None] + torch.arange(block, device=x.device)
        pair_E = torch.arange(pairs, device=x.device, dtype=torch.float64)
        angle_BTE = position_BT[..., None] * self.base ** (-pair_E / pairs)
        angle = angle_BTE.view(-1, block, *[1] * (x.dim() - 3), pairs)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        turned = (torch.addcmul(left * cos, right, sin, value=-1), torch.addcmul(right * cos, left, sin))
        return torch.cat(turned, dim=-1)
