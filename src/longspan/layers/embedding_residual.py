"""What was read, read again further up. Shapes: B batch, T block, D width."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class EmbeddingResidual(nn.Module):
    """out = a h + b N(e) with e what the first block got, N(e) = e / rms(e), and weights per channel.

    Begins with a = 1, b = 0: h as it is. (Jordan et al., modded-nanogpt, 2024, with scalars.)
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stream_D = nn.Parameter(torch.ones(width))
        self.again_D = nn.Parameter(torch.zeros(width))

    def forward(self, h_BTD: Tensor, e_BTD: Tensor) -> Tensor:
        normed_BTD = F.rms_norm(e_BTD, self.again_D.shape, eps=1e-6)
        return torch.addcmul(self.stream_D * h_BTD, self.again_D, normed_BTD)
