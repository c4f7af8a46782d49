"""The end of a post-norm block in half precision: numbers that a sum would round away still count."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from longspan.layers.post_norm import normed_sum


def norm(dtype: torch.dtype = torch.float32) -> nn.LayerNorm:
    torch.manual_seed(0)
    norm = nn.LayerNorm(8)
    nn.init.normal_(norm.weight)
    return norm.to(dtype)


def test_the_sum_is_not_rounded_and_the_stream_is() -> None:
    layer, h = norm(), torch.full((1, 1, 8), 256.0, dtype=torch.bfloat16)
    out = torch.linspace(-0.5, 0.5, 8, dtype=torch.bfloat16).expand(1, 1, 8)  # all lost beside 256 in bf16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = normed_sum(layer, h, out)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, layer(h.float() + out.float()).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_without_autocast_nothing_is_rounded(dtype: torch.dtype) -> None:
    layer = norm(dtype)
    h, out = (torch.randn(2, 3, 8, dtype=dtype) for _ in range(2))
    found = normed_sum(layer, h, out)
    assert found.dtype == dtype
    torch.testing.assert_close(found, layer(h + out), rtol=0, atol=0)
