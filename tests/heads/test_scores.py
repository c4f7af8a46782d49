from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from longspan.heads.scores import ROW, padded_linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("vocabulary", [1, 7, 8, 9])
def test_scores_that_nobody_asked_for_change_nothing(vocabulary: int, bias: bool) -> None:
    given = [torch.randn(3, 5, 4), torch.randn(vocabulary, 4), *([torch.randn(vocabulary)] if bias else [])]
    found = []
    for product in (padded_linear, F.linear):
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        out = product(*leaves, *([] if bias else [None]))
        weight = torch.linspace(-1, 1, out.numel()).view_as(out)
        found.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    for padded, plain in zip(*found, strict=True):
        torch.testing.assert_close(padded, plain)


def test_rows_are_whole() -> None:
    scores = padded_linear(torch.randn(2, 6), torch.randn(205, 6), None)
    assert scores.shape == (2, 205)
    assert scores.stride(0) % ROW == 0
