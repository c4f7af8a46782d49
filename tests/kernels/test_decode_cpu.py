"""One token after another on a CPU, against the specification; and products of few rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from longspan.kernels import span_attention as entry
from longspan.kernels.linear import SMALL_BATCH, linear
from longspan.kernels.span_attention import eager, reference

from .grouped import Case, head_by_head, tensors_of, together
from .test_dispatch import CASES


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_single_query_is_as_the_loops_say(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "span_attention", None)  # no other backend may do it
    case = replace(case, block=1)
    tensors = tensors_of(case)
    given = [max(windows) for windows in case.windows for _ in windows]
    with torch.no_grad():
        expected = head_by_head(reference.span_attention, case, tensors, given)
        found = together(entry.span_attention, case, tensors)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_what_lies_beyond_the_window_is_not_read() -> None:
    case = Case(windows=((4, 6),), reaches=(9,), block=1, positions="shared")
    tensors = tensors_of(case)
    with torch.no_grad():
        expected = together(entry.span_attention, case, tensors)
        tensors["past0"][:, :3] = torch.nan
        assert torch.equal(together(entry.span_attention, case, tensors), expected)


@pytest.mark.parametrize("rows", [(), (1, 1), (3, 2), (SMALL_BATCH,), (SMALL_BATCH + 1,), (0,)])
@pytest.mark.parametrize("outputs", [8, 7])
@pytest.mark.parametrize("bias", [True, False])
def test_products_of_small_batches(rows: tuple[int, ...], outputs: int, bias: bool) -> None:
    x, weight = torch.randn(*rows, 5).double(), torch.randn(outputs, 5).double()
    bias_E = torch.randn(outputs).double() if bias else None
    with torch.no_grad():
        torch.testing.assert_close(linear(x, weight, bias_E), F.linear(x, weight, bias_E))


def test_a_product_of_a_small_batch_has_gradients() -> None:
    weight = torch.randn(8, 5, requires_grad=True)
    linear(torch.ones(1, 5), weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones(8, 5))


def test_weights_may_be_a_transposed_view() -> None:
    x, weight = torch.randn(2, 5).double(), torch.randn(5, 8).double().mT
    with torch.no_grad():
        torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
