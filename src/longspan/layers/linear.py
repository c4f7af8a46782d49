"""The linear layer. Shapes: D width in, E width out."""

from __future__ import annotations

from torch import Tensor, nn

from longspan.kernels.linear import linear


class Linear(nn.Linear):
    """y = W x + b, which reads W as fast as the machine can when there is little else to do."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
