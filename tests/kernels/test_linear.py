"""Products with weights by whatever library: values and gradients are those of torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.kernels.linear import FEW, linear, relu_feed_forward


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def exact(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def assert_same(found: Tensor, tensors: list[Tensor], expected: Tensor, doubles: list[Tensor]) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    weight = torch.linspace(-1, 1, found.numel()).view_as(found)
    gradients = torch.autograd.grad((found * weight).sum(), tensors)
    for one, other in zip(gradients, torch.autograd.grad((expected * weight).sum(), doubles), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [(FEW - 1,), (FEW + 1,), (3, 50)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear(rows: tuple[int, ...], bias: bool) -> None:
    tensors = leaves((*rows, 12), (20, 12), *([(20,)] if bias else []))
    doubles = exact(tensors)
    assert_same(linear(*tensors), tensors, F.linear(*doubles), doubles)


def test_a_matrix_that_lies_the_other_way() -> None:
    x, weight = leaves((40, 12), (12, 20))
    doubles = exact([x, weight])
    assert_same(linear(x, weight.mT), [x, weight], F.linear(doubles[0], doubles[1].mT), doubles)


@pytest.mark.parametrize("rows", [(FEW,), (5, 30)], ids=str)
def test_relu_feed_forward(rows: tuple[int, ...]) -> None:
    tensors = leaves((*rows, 8), (24, 8), (24,), (8, 24), (8,))
    x, w1, b1, w2, b2 = doubles = exact(tensors)
    assert_same(
        relu_feed_forward(*tensors), tensors, F.linear(torch.relu(F.linear(x, w1, b1)), w2, b2), doubles
    )


def test_dropout_between_the_products_has_the_gradient_of_what_it_kept() -> None:
    """With W2 the identity the output is what dropout left of the inner layer."""
    x, w1, b1 = leaves((60, 8), (24, 8), (24,))
    out = relu_feed_forward(x, w1, b1, torch.eye(24), None, dropout=0.4)
    inner = torch.relu(F.linear(*(doubles := exact([x, w1, b1]))))
    kept = (out > 0) / 0.6
    assert 0.5 < ((out > 0).sum() / (inner > 0).sum()).item() < 0.7
    assert_same(out, [x, w1, b1], inner * kept, doubles)


def test_what_wants_no_gradient_gets_none() -> None:
    x, w1, b1, w2, b2 = leaves((40, 8), (24, 8), (24,), (8, 24), (8,))
    relu_feed_forward(x.detach(), w1, b1.detach(), w2, b2).sum().backward()
    assert x.grad is None
    assert b1.grad is None
    assert w1.grad is not None
    assert w2.grad is not None
