"""What the layers of a stack read besides the sum of all layers before. Shapes: B batch, T block, D width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.layers.head_mixing import GATE_INPUTS
from longspan.layers.projections import product_dtype

EPSILON = 1e-6
_SKIP = -1.5  # sigmoid(-1.5) = 0.18 of an early layer at the start
_BACKOUT = 0.2


class ResidualStream(nn.Module):
    """The residual stream x of L layers, with weights. x_0 is the normed embedding, N(e).

        x = a_l x + b_l x_0                               before every layer l
        x = x + sigmoid(s) 2 sigmoid(w . x_0[:C]) x_k     before layer L/2, with x_k after layer L/4 (`skip`)
        x = x - c x_m                                     after the last layer, with x_m after layer 2L/3
                                                          (`backout`)

    a_l falls from 1.15 to 1.05 over the layers, and b_l from 0.2 to 0.05; all weights are learned. After the
    embedding the stream has the precision of products. `first_blocks` are the numbers of the blocks that
    layers begin with.
    """

    def __init__(self, width: int, first_blocks: Sequence[int], *, skip: bool, backout: bool) -> None:
        super().__init__()
        layers = len(first_blocks)
        self.scale_L = nn.Parameter(torch.linspace(1.15, 1.05, layers))
        self.embedding_L = nn.Parameter(torch.linspace(0.2, 0.05, layers))
        self.skip = nn.Parameter(torch.tensor(_SKIP)) if skip else None
        self.skip_gate_C = nn.Parameter(torch.zeros(min(GATE_INPUTS, width))) if skip else None
        self.backout = nn.Parameter(torch.tensor(_BACKOUT)) if backout else None
        self._layer_of = {block: layer for layer, block in enumerate(first_blocks)}
        self._skip_from, self._skip_to, self._backout_from = layers // 4, layers // 2, 2 * layers // 3

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
    """One pass over the layers: keeps what later layers read."""

    def __init__(self, stream: ResidualStream) -> None:
        self._stream = stream
        self._kept: dict[str, Tensor] = {}
        self._weights = list(zip(stream.scale_L.unbind(), stream.embedding_L.unbind(), strict=True))

    def before(self, block: int, x_BTD: Tensor) -> tuple[Tensor, Blend | None]:
        """The input of this block, and what it has to blend it with."""
        stream, kept = self._stream, self._kept
        layer = stream._layer_of.get(block)
        if layer is None:
            return x_BTD, None
        if layer == 0:
            kept["first"] = x_BTD = stream._normed(x_BTD)
        if layer == stream._skip_from + 1 and stream.skip is not None:
            kept["skip"] = x_BTD
        if layer == stream._backout_from + 1 and stream.backout is not None:
            kept["backout"] = x_BTD
        x0_BTD = kept["first"]
        blend = Blend(*self._weights[layer], x0_BTD)
        if layer == stream._skip_to and "skip" in kept:
            assert stream.skip is not None
            assert stream.skip_gate_C is not None
            gate_C = stream.skip_gate_C.to(x_BTD.dtype)
            gate_BT1 = (x0_BTD[..., : len(gate_C)] * gate_C).sum(-1, keepdim=True).sigmoid()
            skipped_BTD = (2 * stream.skip.sigmoid()).to(x_BTD.dtype) * gate_BT1 * kept["skip"]
            return blend.of(x_BTD) + skipped_BTD, None
        return x_BTD, blend

    def end(self, x_BTD: Tensor) -> Tensor:
        """The stream after the last block."""
        if self._stream.backout is None or "backout" not in self._kept:
            return x_BTD
        return x_BTD - self._stream.backout.to(x_BTD.dtype) * self._kept["backout"]
