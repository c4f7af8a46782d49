"""What the heads of an attention layer mix in: gates, embeddings of the token as values, the token before.

Shapes: B batch, T block, D width, H heads, K head width, R rows of heads, C inputs of a gate, P pairs that
RoPE does not rotate, X = R K.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longspan.flops import Shape
from longspan.layers.select_heads import select_heads

GATE_INPUTS = 12


class HeadGates(nn.Module):
    """sigmoid(G x[:C]): one gate for every head and token, from a few channels of the layer's input.

    G begins at zero: every gate is then one half.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.weight_HC = nn.Parameter(torch.zeros(num_heads, min(GATE_INPUTS, width)))

    def of(self, heads: list[int]) -> Tensor:
        """The rows of G for these heads, [H, C]."""
        return select_heads(self.weight_HC, heads)

    def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"scalar": [self.weight_HC]}

    def flops(self, shape: Shape) -> float:
        return 2.0 * self.weight_HC.numel()


def gates(x_BTC: Tensor, weight_HC: Tensor) -> Tensor:
    """The gates of all heads, [B, T, H]."""
    return F.linear(x_BTC, weight_HC.to(x_BTC.dtype)).sigmoid()


def gated(found_BTHK: Tensor, x_BTC: Tensor, weight_HC: Tensor) -> Tensor:
    """The heads times their gates."""
    return found_BTHK * gates(x_BTC, weight_HC)[..., None]


def with_values(rows_BTX: Tensor, value_BTHK: Tensor, gate_BTH: Tensor) -> Tensor:
    """Projected rows, of which the last, those of values, get 2 gate `value`; they are changed in place."""
    given = rows_BTX, value_BTHK.to(rows_BTX.dtype), gate_BTH.to(rows_BTX.dtype)
    rows_BTX = _WithValues.apply(*given)  # type: ignore[no-untyped-call]
    return rows_BTX


class _WithValues(torch.autograd.Function):
    """In place: the other rows, two thirds, are not copied."""

    @staticmethod
    def forward(ctx: Any, rows_BTX: Tensor, value_BTHK: Tensor, gate_BTH: Tensor) -> Tensor:
        ctx.mark_dirty(rows_BTX)
        ctx.save_for_backward(value_BTHK, gate_BTH)
        _last_rows(rows_BTX, value_BTHK).addcmul_(value_BTHK, gate_BTH[..., None], value=2)
        return rows_BTX

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows_BTX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        value_BTHK, gate_BTH = ctx.saved_tensors
        dv_BTHK = _last_rows(drows_BTX, value_BTHK)
        return drows_BTX, dv_BTHK * (2 * gate_BTH)[..., None], 2 * (dv_BTHK * value_BTHK).sum(-1)


def _last_rows(rows_BTX: Tensor, like_BTHK: Tensor) -> Tensor:
    """The last rows, as many as `like` has."""
    heads, width = like_BTHK.shape[2:]
    return torch.unflatten(rows_BTX[..., -heads * width :], -1, (heads, width))


def offset_keys(rows_BTRK: Tensor, heads: int, before_B1H2P: Tensor) -> Tensor:
    """Projected rows in which the pairs of a key that RoPE does not rotate are those of the token before.

    `before` has those of the last token of the block before. A query that matches them finds what followed an
    earlier token.
    """
    q_BTHK, k_BTHK, v_BTHK = rows_BTRK.split(heads, dim=2)
    k_BTH2E, still = torch.unflatten(k_BTHK, -1, (2, -1)), before_B1H2P.shape[-1]
    rotated_BTH2, still_BTH2P = k_BTH2E[..., :-still], k_BTH2E[..., -still:]
    earlier_BTH2P = torch.cat([before_B1H2P.to(still_BTH2P.dtype), still_BTH2P[:, :-1]], dim=1)
    k_BTHK = torch.cat([rotated_BTH2, earlier_BTH2P], dim=-1).flatten(-2)
    return torch.cat([q_BTHK, k_BTHK, v_BTHK], dim=2)


def last_still(rows_BTRK: Tensor, heads: int, still: int) -> Tensor:
    """The pairs of the last token's keys that RoPE does not rotate, [B, 1, H, 2, P]."""
    return torch.unflatten(rows_BTRK[:, -1:, heads : 2 * heads], -1, (2, -1))[..., -still:]
