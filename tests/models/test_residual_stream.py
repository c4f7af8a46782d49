"""The residual stream: what every layer reads at the start of training."""

from __future__ import annotations

import torch

from longspan.layers.residual_stream import ResidualStream


def test_layers_begin_with_the_documented_sums() -> None:
    """a from 1.15 to 1.05 and b from 0.2 to 0.05; a layer begins at its first block only."""
    torch.manual_seed(1)
    stream = ResidualStream([0, 2, 4])
    layers = stream.begin()
    h_BTD = 3 * torch.randn(2, 5, 8)
    x0_BTD = h_BTD / h_BTD.square().mean(-1, keepdim=True).sqrt()
    for block, a, b in ((0, 1.15, 0.2), (2, 1.1, 0.125), (4, 1.05, 0.05)):
        x_BTD, blend = layers.before(block, h_BTD)
        assert blend is not None
        torch.testing.assert_close(x_BTD, x0_BTD if block == 0 else h_BTD)
        torch.testing.assert_close(blend.of(x_BTD), a * x_BTD + b * x0_BTD)
        assert layers.before(block + 1, h_BTD) == (h_BTD, None)
