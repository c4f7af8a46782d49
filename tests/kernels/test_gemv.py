"""A product with very few rows in one kernel; without a GPU by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.kernels import linear

gemv = pytest.importorskip("longspan.kernels.gemv", reason="needs Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("more", [(), ("bias",), ("onto",), ("bias", "onto"), ("squared relu",)], ids=str)
@pytest.mark.parametrize("rows", [1, linear.GEMV_ROWS])
@pytest.mark.parametrize(("outputs", "width"), [(5, 7), (16, 96), (3, 200)])
def test_it_is_the_product(
    outputs: int,
    width: int,
    rows: int,
    more: tuple[str, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tile of 64 has many outputs of narrow rows, or a part of a wide one."""
    monkeypatch.setattr(gemv, "TILE", 64)
    torch.manual_seed(0)
    shapes = {
        "x": (1, rows, width),
        "weight": (outputs, width),
        "bias": (outputs,),
        "onto": (1, rows, outputs),
    }
    given = {name: torch.randn(shape, dtype=dtype, device=DEVICE) for name, shape in shapes.items()}
    x, weight, bias, onto = (
        given["x"],
        given["weight"],
        *(given[n] if n in more else None for n in ("bias", "onto")),
    )
    found = gemv.product(x, weight, bias, onto, squared_relu="squared relu" in more)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    rounding = ROUNDING[dtype]
    if "squared relu" in more:
        expected, rounding = linear.squared_relu(expected), 2 * rounding  # a square has twice the error
    expected = expected if onto is None else expected + onto.double()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=10 * ROUNDING[dtype])


@pytest.mark.parametrize("rows", [1, linear.GEMV_ROWS, linear.GEMV_ROWS + 1])
def test_a_fixed_product_is_added_to_what_there_is(rows: int) -> None:
    torch.manual_seed(0)
    x, weight, bias, onto = (
        torch.randn(shape, device=DEVICE) for shape in [(1, rows, 12), (8, 12), (8,), (1, rows, 8)]
    )
    with torch.no_grad():
        found = linear.FixedProduct(weight, bias)(x, onto=onto)
    torch.testing.assert_close(found, onto + F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", [linear.squared_relu, F.gelu])
@pytest.mark.parametrize("rows", [1, linear.GEMV_ROWS + 1])
@pytest.mark.parametrize("alike", [False, True])
def test_a_fixed_product_has_an_activation(
    rows: int, activation: Callable[[Tensor], Tensor], alike: bool
) -> None:
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(shape, device=DEVICE) for shape in [(1, rows, 12), (8, 12), (8,)])
    token = linear.ALIKE.set(alike)
    try:
        fixed = linear.FixedProduct(weight, bias)
    finally:
        linear.ALIKE.reset(token)
    with torch.no_grad():
        found = fixed(x, activation=activation)
    torch.testing.assert_close(found, activation(F.linear(x, weight, bias)), rtol=1e-5, atol=1e-5)


def test_squared_relu_of_nothing_known_is_not_zero() -> None:
    x = torch.full((1, 1, 4), float("nan"), device=DEVICE)
    assert gemv.product(x, torch.ones(3, 4, device=DEVICE), None, None, squared_relu=True).isnan().all()
