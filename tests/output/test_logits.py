from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from longspan.output.logits import ROW, padded_linear, scores


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
    found = padded_linear(torch.randn(2, 6), torch.randn(205, 6), None)
    assert found.shape == (2, 205)
    assert found.stride(0) % ROW == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rows", [64, 65])
def test_on_a_gpu_they_are_padded_where_rows_are_many(rows: int) -> None:
    hidden, weight = (torch.randn(size, 512, device="cuda").bfloat16() for size in (rows, 205))
    found = scores(hidden, weight, None)
    torch.testing.assert_close(found, (hidden.double() @ weight.double().mT).float(), rtol=1e-2, atol=0.2)
    assert found.shape == (rows, 205)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        scores(hidden, weight, None)
    assert any(event.key == "aten::constant_pad_nd" for event in profile.key_averages()) == (rows > 64)
