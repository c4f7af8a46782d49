from __future__ import annotations

import pytest
import torch

from longspan.layers.dropout import dropout, hashed_dropout


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.8])
def test_keeps_its_share_and_the_mean(probability):
    torch.manual_seed(0)
    x = torch.ones(500, 1000)
    out = hashed_dropout(x, probability)
    kept = out > 0
    assert kept.float().mean().item() == pytest.approx(1 - probability, abs=0.003)
    assert torch.equal(out[kept], x[kept] / (1 - probability))
    assert kept.float().mean(0).std() < 0.03  # columns alike, and rows
    assert kept.float().mean(1).std() < 0.03


def test_neighbours_and_draws_know_nothing_of_each_other():
    torch.manual_seed(0)
    kept = [(hashed_dropout(torch.ones(1000, 1000), 0.3) > 0).double() - 0.7 for _ in range(2)]
    for one, other in ((kept[0], kept[1]), (kept[0][1:], kept[0][:-1]), (kept[0][:, 1:], kept[0][:, :-1])):
        assert abs((one * other).mean().item()) < 0.21 * 0.005


def test_gradient_goes_where_numbers_went():
    torch.manual_seed(0)
    x = torch.randn(40, 50, requires_grad=True)
    out = hashed_dropout(x, 0.5)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, (out != 0) * 2.0)


def test_outside_compiled_code_it_is_that_of_torch():
    x = torch.ones(100)
    torch.manual_seed(1)
    ours = dropout(x, 0.5, training=True)
    torch.manual_seed(1)
    assert torch.equal(ours, torch.nn.functional.dropout(x, 0.5))
    assert dropout(x, 0.5, training=False) is x
