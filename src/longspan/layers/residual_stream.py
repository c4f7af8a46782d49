"""What the layers of a stack read besides the sum of all layers before. Shapes: B batch, T block, D width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.layers.projections import product_dtype

EPSILON = 1e-6


class ResidualStream(nn.Module):
    """The residual stream x of L layers: x = a_l x + b_l x_0 before every layer l, with learned weights.

    x_0 is what the first layer reads, normed: N(e), or with a short convolution N(e + convolution). a_l falls
    from 1.15 to 1.05 over the layers, and b_l from 0.2 to 0.05.
    After the embedding the stream has the precision of products. `first_blocks` are the numbers of the blocks
    that layers begin with.
    """

    def __init__(self, first_blocks: Sequence[int]) -> None:
        super().__init__()
        layers = len(first_blocks)
        self.scale_L = nn.Parameter(torch.linspace(1.15, 1.05, layers))
        self.embedding_L = nn.Parameter(torch.linspace(0.2, 0.05, layers))
        self._layer_of = {block: layer for layer, block in enumerate(first_blocks)}

    def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"scalar": list(self.parameters())}

    def begin(self) -> Pass:
        """A pass over the layers."""
        return Pass(self)

    def compile_parts(self) -> None:
        self._normed = torch.compile(self._normed)  # type: ignore[method-assign]

    def _normed(self, h_BTD: Tensor) -> Tensor:
        return F.rms_norm(h_BTD, h_BTD.shape[-1:], eps=EPSILON).to(product_dtype(h_BTD))


class Blend(NamedTuple):
    """a x + b x_0: what a layer reads in place of x."""

    a: Tensor
    b: Tensor
    x0_BTD: Tensor

    def of(self, x_BTD: Tensor) -> Tensor:
        a, b = self.a.to(x_BTD.dtype), self.b.to(x_BTD.dtype)
        return torch.addcmul(b * self.x0_BTD, a, x_BTD)


class Pass:
    """One pass over the layers: keeps x_0 for all of them."""

    def __init__(self, stream: ResidualStream) -> None:
        self._stream = stream
        self._x0_BTD: Tensor | None = None
        self._weights = list(zip(stream.scale_L.unbind(), stream.embedding_L.unbind(), strict=True))

    def before(self, block: int, x_BTD: Tensor) -> tuple[Tensor, Blend | None]:
        """The input of this block, and what it has to blend it with."""
        layer = self._stream._layer_of.get(block)
        if layer is None:
            return x_BTD, None
        if self._x0_BTD is None:
            self._x0_BTD = x_BTD = self._stream._normed(x_BTD)
        return x_BTD, Blend(*self._weights[layer], self._x0_BTD)
