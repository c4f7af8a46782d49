"""Gates of value embeddings, and keys of the token before.

Shapes: B batch, T block, H heads, K head width, R rows of heads, C inputs of a gate, S pairs that RoPE does
not rotate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
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


def last_still(rows_BTRK: Tensor, heads: int, still: int) -> Tensor:
    """The pairs of the last token's keys that RoPE does not rotate, [B, 1, H, 2, S].

    A copy: the state would keep all rows in memory.
    """
    return torch.unflatten(rows_BTRK[:, -1:, heads : 2 * heads], -1, (2, -1))[..., -still:].clone()
