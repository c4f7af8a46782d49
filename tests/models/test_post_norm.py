"""The end of a post-norm block in half precision: numbers that a sum would round away still count."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from longspan.kernels.dispatch import forced
from longspan.layers import feed_forward, post_norm
from longspan.layers.feed_forward import FeedForward
from longspan.layers.post_norm import kernels_for, normed_sum
from longspan.state import State


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


def outcome(block: FeedForward, h: torch.Tensor) -> list[torch.Tensor]:
    """What it gives, and every gradient."""
    leaf = h.clone().requires_grad_()
    out, _ = block(leaf, State({}))
    above = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out, *torch.autograd.grad(out, [leaf, *block.parameters()], above)]


def test_a_block_by_kernels_is_the_same_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("longspan.kernels.post_norm", reason="needs Triton")
    torch.manual_seed(0)
    block = FeedForward(8, 24, dropout=0.0, norm_first=False)
    nn.init.normal_(block.norm.bias)
    h = torch.randn(2, 3, 8)
    expected = [*outcome(block, h), normed_sum(block.norm, h, h.flip(1))]
    for module in (feed_forward, post_norm):
        monkeypatch.setattr(module, "kernels_for", lambda *_: kernels)
    called = []
    monkeypatch.setattr(kernels, "feed_forward", called_too(called, kernels.feed_forward))
    monkeypatch.setattr(kernels, "normed_sum", called_too(called, kernels.normed_sum))
    found = [*outcome(block, h), normed_sum(block.norm, h, h.flip(1))]
    assert called == ["feed_forward", "normed_sum"]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def called_too(called, function):
    def and_noted(*args, **options):
        called.append(function.__name__)
        return function(*args, **options)

    return and_noted


def test_dropout_is_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("longspan.kernels.post_norm", reason="needs Triton")
    for module in (feed_forward, post_norm):
        monkeypatch.setattr(module, "kernels_for", lambda *_: kernels)
    block = FeedForward(8, 24, dropout=0.5, output_dropout=0.5, norm_first=False)
    h = torch.randn(2, 3, 8)
    assert not block(h, State({}))[0].equal(block(h, State({}))[0])
    assert normed_sum(block.norm, h, h, 0.5, training=True).ne(normed_sum(block.norm, h, h)).any()
    block.eval()
    torch.testing.assert_close(block(h, State({}))[0], block(h, State({}))[0], rtol=0, atol=0)
    assert normed_sum(block.norm, h, h, 0.5).equal(normed_sum(block.norm, h, h))


def test_kernels_are_for_plain_norms_on_a_gpu() -> None:
    pytest.importorskip("longspan.kernels.post_norm", reason="needs Triton")

    class Elsewhere:
        is_cuda, dtype = True, torch.float32

    assert kernels_for(nn.LayerNorm(4), Elsewhere(), 0.1) is not None
    assert kernels_for(nn.LayerNorm(4), torch.zeros(4), 0.1) is None
    assert kernels_for(nn.LayerNorm(4, bias=False), Elsewhere(), 0.1) is None
    assert kernels_for(nn.RMSNorm(4), Elsewhere(), 0.1) is None
    assert kernels_for(nn.LayerNorm(4), Elsewhere(), post_norm.GrowingDropout(0.0, 0.3)) is None
    with forced("eager"):
        assert kernels_for(nn.LayerNorm(4), Elsewhere(), 0.1) is None
    Elsewhere.dtype = torch.float64
    assert kernels_for(nn.LayerNorm(4), Elsewhere(), 0.1) is None
