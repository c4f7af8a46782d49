"""The linear layer. Shapes: D width in, E width out."""

from __future__ import annotations

from torch import Tensor, nn

from longspan.kernels.linear import linear


class Linear(nn.Linear):
    """y = W x + b; for small batches a kernel that is limited only by the time to read W."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
