"""RMSNorm: N(x) = g x / rms(x)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.RMSNorm):
    """torch's, for inputs of any precision: its fused kernel needs a gain of the same precision."""

    def forward(self, x: Tensor) -> Tensor:
        gain = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, gain, self.eps)
