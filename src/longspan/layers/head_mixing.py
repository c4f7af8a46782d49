"""What the heads of an attention layer mix in: gates, embeddings of the token as values, the token before.

Shapes: B batch, T block, D width, H heads, K head width, R rows of heads, C inputs of a gate, P pairs that
RoPE does not rotate.
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


def gated(found_BTHK: Tensor, x_BTC: Tensor, weight_HC: Tensor) -> Tensor:
    """The heads times their gates."""
    return found_BTHK * F.linear(x_BTC, weight_HC.to(x_BTC.dtype)).sigmoid()[..., None]


def mixed(
    rows_BTRK: Tensor,
    heads: int,
    value_BTHK: Tensor | None,
    x_BTC: Tensor,
    gates_HC: Tensor | None,
    before_B1H2P: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values: values get 2 gate `value`, and keys are offset.

    The pairs of a key that RoPE does not rotate are those of the token before; `before` has those of the last
    token of the block before. A query that matches them finds what followed an earlier token.
    """
    q_BTHK, k_BTHK, v_BTHK = rows_BTRK.split(heads, dim=2)
    if value_BTHK is not None and gates_HC is not None:
        v_BTHK = v_BTHK + 2 * gated(value_BTHK.to(v_BTHK.dtype), x_BTC, gates_HC)
    if before_B1H2P is not None:
        k_BTH2E, still = torch.unflatten(k_BTHK, -1, (2, -1)), before_B1H2P.shape[-1]
        rotated_BTH2, still_BTH2P = k_BTH2E[..., :-still], k_BTH2E[..., -still:]
        earlier_BTH2P = torch.cat([before_B1H2P.to(still_BTH2P.dtype), still_BTH2P[:, :-1]], dim=1)
        k_BTHK = torch.cat([rotated_BTH2, earlier_BTH2P], dim=-1).flatten(-2)
    return q_BTHK, k_BTHK, v_BTHK


def last_still(rows_BTRK: Tensor, heads: int, still: int) -> Tensor:
    """The pairs of the last token's keys that RoPE does not rotate, [B, 1, H, 2, P]."""
    return torch.unflatten(rows_BTRK[:, -1:, heads : 2 * heads], -1, (2, -1))[..., -still:]
