"""Products with a matrix of weights. Shapes: N rows, C pieces of the matrix, D width in, E width out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

FEW = 16
"""With more rows than this a product takes longer than reading its weights."""

PIECES = 4
"""More give no more speed, up to this many processors."""


def linear(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """`F.linear`: W x + b. On a CPU and without gradients a few rows get the speed of reading W.

    The library gives such a product to one processor. Here W is cut into pieces, each for its part of the
    result, and products of several matrices are divided among all processors.
    """
    rows = x.numel() // x.shape[-1]
    plain = x.is_cuda or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type)
    if plain or not 0 < rows <= FEW or weight_ED.shape[0] % PIECES or torch.compiler.is_compiling():
        return F.linear(x, weight_ED, bias_E)
    x_CND = x.reshape(1, rows, -1).expand(PIECES, -1, -1)
    out_CNE = torch.bmm(x_CND, weight_ED.view(PIECES, -1, x.shape[-1]).mT)
    out = out_CNE.transpose(0, 1).reshape(*x.shape[:-1], -1)
    return out if bias_E is None else out.add_(bias_E)
