"""Rows of a small table are those of `F.embedding`, and so are their gradients."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from longspan.layers.token_rows import MOST_ROWS, _TokenRows, token_rows

VOCABULARY, WIDTH = 7, 5


def table(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()


def some_tokens(*shape: int) -> torch.Tensor:
    """The last word never occurs."""
    return torch.randint(VOCABULARY - 1, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(), (6,), (1, 3), (4, 9), (2, 3, 4), (2, 0)])
def test_rows_and_gradients(shape: tuple[int, ...]) -> None:
    tokens, table_VD = some_tokens(*shape), table()
    found, expected = _TokenRows.apply(tokens, table_VD), F.embedding(tokens, table_VD)
    assert torch.equal(found, expected)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    (found_VD,), (expected_VD,) = (
        torch.autograd.grad((rows * weights).sum(), table_VD) for rows in (found, expected)
    )
    torch.testing.assert_close(found_VD, expected_VD)
    assert not found_VD[-1].any()


def test_gradients_of_transposed_tokens() -> None:
    tokens, table_VD = some_tokens(4, 9).t(), table(torch.float64)
    weights = torch.randn(4, 9, WIDTH, dtype=torch.float64).transpose(0, 1)
    found, expected = (
        torch.autograd.grad((rows(tokens, table_VD) * weights).sum(), table_VD)[0]
        for rows in (_TokenRows.apply, F.embedding)
    )
    torch.testing.assert_close(found, expected)


def test_gradcheck() -> None:
    tokens = some_tokens(2, 6)
    assert torch.autograd.gradcheck(lambda rows: _TokenRows.apply(tokens, rows), table(torch.float64))
    assert torch.autograd.gradgradcheck(lambda rows: _TokenRows.apply(tokens, rows), table(torch.float64))


def test_a_table_in_half_precision_has_its_gradient_in_float32() -> None:
    table_VD, tokens = table(), some_tokens(3, 50)
    _TokenRows.apply(tokens, table_VD.bfloat16()).sum(dtype=torch.float32).backward()
    counts_V = tokens.flatten().bincount(minlength=VOCABULARY).float()
    assert table_VD.grad is not None
    assert table_VD.grad.dtype == torch.float32
    assert torch.equal(table_VD.grad, counts_V[:, None].expand(-1, WIDTH))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: type) -> None:
    with mode():
        tokens, table_VD = some_tokens(1, 3), table()
        rows = _TokenRows.apply(tokens, table_VD)
        assert torch.equal(rows, F.embedding(tokens, table_VD))
        assert not rows.requires_grad


@pytest.mark.parametrize(
    ("device", "rows", "ours"),
    [("cpu", VOCABULARY, False), ("cuda", MOST_ROWS, True), ("cuda", MOST_ROWS + 1, False)],
)
def test_only_small_tables_on_a_gpu_use_it(
    device: str, rows: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(_TokenRows, "apply", lambda *inputs: calls.append(1) or F.embedding(*inputs))
    with FakeTensorMode():  # needs no GPU
        table_VD = torch.empty(rows, WIDTH, device=device)
        found = token_rows(torch.empty(2, 3, dtype=torch.long, device=device), table_VD)
    assert found.shape == (2, 3, WIDTH)
    assert bool(calls) == ours
