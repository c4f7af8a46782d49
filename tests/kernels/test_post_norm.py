"""The end of a post-norm block by kernels, against loops over rows, and its gradients against torch's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

post_norm = pytest.importorskip("longspan.kernels.post_norm", reason="needs Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPSILON = 1e-5
# Rows and width: more rows than a program takes, widths that are no power of two, one row, one number.
SHAPES = [(70, 24), (9, 32), (1, 5), (3, 1)]
INNER = 40


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every program has several tiles, and there are several of all."""
    monkeypatch.setattr(post_norm, "ROW_NUMBERS", 128)
    monkeypatch.setattr(post_norm, "ROW_PROGRAMS", 3)
    monkeypatch.setattr(post_norm, "WIDE_PROGRAMS", 2)
    monkeypatch.setattr(post_norm, "WIDE_COLUMNS", 16)
    monkeypatch.setattr(post_norm, "PARTS", 2)
    monkeypatch.setattr(post_norm, "PAIRS", 64)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes]


def exact(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.detach().double().cpu().requires_grad_() for leaf in leaves]


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(found.double().cpu(), expected.double().cpu(), rtol=tolerance, atol=tolerance)


def assert_same(found: Tensor, leaves: list[Tensor], expected: Tensor, doubles: list[Tensor]) -> None:
    """Values, and the gradients that these weights give."""
    close(found, expected)
    above = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    gradients = torch.autograd.grad(found, leaves, above.to(found))
    for one, other in zip(gradients, torch.autograd.grad(expected, doubles, above), strict=True):
        close(one, other, 1e-4)


def normed_sum(h: Tensor, out: Tensor, weight: Tensor, bias: Tensor, dropout: float = 0.0) -> Tensor:
    found: Tensor = post_norm.normed_sum(h, out, post_norm.Norm(weight, bias, EPSILON, dropout), h.dtype)
    return found


def feed_forward(
    h: Tensor, *weights: Tensor, inside: float = 0.0, outside: float = 0.0, dtype: torch.dtype | None = None
) -> Tensor:
    norm = post_norm.Norm(*weights[4:], EPSILON, outside)
    found: Tensor = post_norm.feed_forward(h, *weights[:4], norm, dropout=inside, dtype=dtype or h.dtype)
    return found


def feed_forward_shapes(rows: tuple[int, ...], width: int) -> list[tuple[int, ...]]:
    return [(*rows, width), (INNER, width), (INNER,), (width, INNER), (width,), (width,), (width,)]


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_the_normed_sum_is_the_loops(rows: int, width: int) -> None:
    h, out, weight, bias = leaves = tensors((rows, width), (rows, width), (width,), (width,))
    expected = torch.empty(rows, width)
    for n in range(rows):
        row = [(h[n, d] + out[n, d]).item() for d in range(width)]
        mean = sum(row) / width
        deviation = math.sqrt(sum((x - mean) ** 2 for x in row) / width + EPSILON)
        for d in range(width):
            expected[n, d] = (row[d] - mean) / deviation * weight[d].item() + bias[d].item()
    close(normed_sum(*leaves), expected)


@pytest.mark.parametrize(("rows", "width"), SHAPES[:3])
def test_gradients_of_the_normed_sum(rows: int, width: int) -> None:
    leaves = tensors((rows, width), (rows, width), (width,), (width,))
    h, out, weight, bias = doubles = exact(leaves)
    assert_same(normed_sum(*leaves), leaves, F.layer_norm(h + out, (width,), weight, bias, EPSILON), doubles)


@pytest.mark.parametrize(("rows", "width"), [((70,), 24), ((2, 9), 32), ((1,), 5)])
def test_the_feed_forward_block(rows: tuple[int, ...], width: int) -> None:
    leaves = tensors(*feed_forward_shapes(rows, width))
    h, w1, b1, w2, b2, weight, bias = doubles = exact(leaves)
    out = F.linear(torch.relu(F.linear(h, w1, b1)), w2, b2)
    assert_same(
        feed_forward(*leaves), leaves, F.layer_norm(h + out, (width,), weight, bias, EPSILON), doubles
    )


@pytest.mark.parametrize(
    "part", [lambda h: h[:, -1:], lambda h: h[..., :8], lambda h: h[::2], lambda h: h[:1].expand(4, -1, -1)]
)
def test_rows_that_are_not_contiguous(part) -> None:
    whole = torch.randn(4, 3, 24, device=DEVICE)
    h = part(whole)
    leaves = [h.detach().requires_grad_(), *tensors(*feed_forward_shapes((), h.shape[-1])[1:])]
    assert leaves[0].stride() == h.stride()
    one, w1, b1, w2, b2, weight, bias = doubles = exact(leaves)
    out = F.linear(torch.relu(F.linear(one, w1, b1)), w2, b2)
    width = h.shape[-1:]
    expected = F.layer_norm(one + out, width, weight, bias, EPSILON)
    assert_same(feed_forward(*leaves), leaves, expected, doubles)
    of_norm = [leaves[0], leaves[5], leaves[6]]
    expected = F.layer_norm(one + one, width, weight, bias, EPSILON)
    found = normed_sum(leaves[0], leaves[0], *of_norm[1:])
    assert_same(found, of_norm, expected, [one, weight, bias])


def test_what_is_frozen_gets_no_gradient() -> None:
    leaves = tensors(*feed_forward_shapes((5,), 8))
    for leaf in leaves[:2]:
        leaf.requires_grad_(False)
    feed_forward(*leaves).sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [True, True, *[False] * 5]
    leaves[0].requires_grad_()
    leaves[3].requires_grad_(False)
    leaves[3].grad = None
    feed_forward(*leaves).sum().backward()
    assert leaves[0].grad is not None
    assert leaves[3].grad is None


def test_what_the_norm_drops_has_no_gradient() -> None:
    """With h = 0 a row of the sum is what dropout left; the weights of the norm undo it."""
    rows, width, probability = 200, 64, 0.3
    out = torch.ones(rows, width, device=DEVICE, requires_grad=True)
    h, weight, bias = (
        torch.zeros_like(out),
        torch.ones(width, device=DEVICE),
        torch.zeros(width, device=DEVICE),
    )
    torch.manual_seed(1)
    found = normed_sum(h, out, weight, bias, probability)
    kept = found > 0
    assert kept.float().mean().item() == pytest.approx(1 - probability, abs=0.015)
    assert not kept.equal(normed_sum(h, out, weight, bias, probability) > 0)
    leaf = out.detach().double().requires_grad_()
    expected = F.layer_norm(leaf * kept / (1 - probability), (width,), eps=EPSILON)
    close(found, expected)
    above = torch.randn_like(expected)
    gradients = [torch.autograd.grad(y, x, above.to(y))[0] for y, x in ((found, out), (expected, leaf))]
    close(*gradients, 1e-4)
    assert gradients[0][~kept].eq(0).all()


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_what_is_dropped_inside(probability: float) -> None:
    """It can be read from the relu's numbers, where it is made in place: pairs, columns and rows are fair."""
    torch.manual_seed(2)
    inner = torch.ones(512, 128, device=DEVICE)
    post_norm._relu_and_drop(inner, probability)
    threshold = int(probability * 2**16) / 2**16
    assert inner.unique().tolist() == [0.0, pytest.approx(1 / (1 - threshold))]
    kept = (inner > 0).double().cpu() - (1 - probability)
    deviation = math.sqrt(probability * (1 - probability))
    for part in (kept.mean(0), kept.mean(1)):
        assert part.abs().max().item() < 5 * deviation / math.sqrt(kept.numel() / part.numel())
    for other in (kept.roll(1, 0), kept.roll(1, 1), kept.view(-1, 2, 64).flip(1).reshape(kept.shape)):
        assert (kept * other).mean().abs().item() < 5 * deviation**2 / math.sqrt(kept.numel())


def test_dropout_in_the_block_has_the_gradient_of_what_it_kept() -> None:
    """The same seeds give the same block again, with one number moved a little: differences, not formulas."""
    inputs = tensors(*feed_forward_shapes((3,), 8))
    above = torch.linspace(-1, 1, 24, device=DEVICE).view(3, 8)

    def value(*moved: Tensor) -> Tensor:
        torch.manual_seed(3)
        return (feed_forward(*moved, inside=0.4, outside=0.3) * above).sum()

    gradients = torch.autograd.grad(value(*inputs), inputs)
    draw = torch.Generator().manual_seed(4)
    for place, gradient in enumerate(gradients):
        direction = torch.randn(gradient.shape, generator=draw).to(DEVICE)
        there, back = (
            value(*inputs[:place], inputs[place] + step * direction, *inputs[place + 1 :])
            for step in (1e-3, -1e-3)
        )
        slope = ((there - back) / 2e-3).item()
        assert slope == pytest.approx((gradient * direction).sum().item(), rel=0.02, abs=0.02)


def test_a_stream_that_is_more_exact_than_the_products() -> None:
    """Its gradient is as exact as itself."""
    half = torch.float16
    leaves = tensors(*feed_forward_shapes((5,), 16))
    with torch.no_grad():
        for leaf in leaves[1:5]:
            leaf *= 0.3
    found = feed_forward(*leaves, dtype=half)
    assert found.dtype == half
    h, w1, b1, w2, b2, weight, bias = doubles = exact(leaves)
    expected = F.layer_norm(
        h + F.linear(torch.relu(F.linear(h, w1, b1)), w2, b2), (16,), weight, bias, EPSILON
    )
    close(found, expected, 1e-2)
    above = torch.linspace(-1, 1, 80, dtype=torch.float64).view(5, 16)
    gradients = torch.autograd.grad(found, leaves, above.to(found))
    for leaf, one, other in zip(
        leaves, gradients, torch.autograd.grad(expected, doubles, above), strict=True
    ):
        assert one.dtype == leaf.dtype
        close(one, other, 3e-2)


def test_a_number_that_is_none_is_seen() -> None:
    leaves = tensors(*feed_forward_shapes((2,), 8))
    with torch.no_grad():
        leaves[1][3] = math.nan
    found = feed_forward(*leaves)
    assert found.isnan().all()


def test_no_rows() -> None:
    leaves = tensors(*feed_forward_shapes((0,), 8))
    gradients = torch.autograd.grad(feed_forward(*leaves).sum(), leaves)
    assert all(gradient.eq(0).all() for gradient in gradients)
