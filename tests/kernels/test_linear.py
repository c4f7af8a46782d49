"""Products with weights by whatever library: values and gradients are those of torch in float64."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.kernels.linear import SMALL_BATCH, linear
from longspan.machine_memory import bound_code_of_products
from tests import forks


def products_of_many_sizes() -> int:
    """Exit status: how many MB the process grew, at most 255."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    bound_code_of_products()
    weight_ED, before = torch.randn(128, 128), 0
    for rows in range(100, 1000):
        linear(torch.randn(rows, 128), weight_ED)
        if rows == 400:
            before = resident()
    return min(255, max(0, (resident() - before) // 2**20))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_does_not_grow_with_every_number_of_rows() -> None:
    """oneDNN would keep code for each, 300 MB here."""
    assert forks.finish(forks.start(products_of_many_sizes)) < 60


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


@pytest.mark.parametrize("rows", [(SMALL_BATCH - 1,), (SMALL_BATCH + 1,), (3, 50)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear(rows: tuple[int, ...], bias: bool) -> None:
    tensors = leaves((*rows, 12), (20, 12), *([(20,)] if bias else []))
    doubles = exact(tensors)
    assert_same(linear(*tensors), tensors, F.linear(*doubles), doubles)


def test_a_matrix_that_lies_the_other_way() -> None:
    x, weight = leaves((40, 12), (12, 20))
    doubles = exact([x, weight])
    assert_same(linear(x, weight.mT), [x, weight], F.linear(doubles[0], doubles[1].mT), doubles)


def test_no_gradient_where_none_is_needed() -> None:
    x, weight, bias = leaves((40, 8), (24, 8), (24,))
    linear(x.detach(), weight, bias.detach()).sum().backward()
    assert x.grad is None
    assert bias.grad is None
    assert weight.grad is not None
