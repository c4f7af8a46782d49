from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspan.config import ModernConfig, SpanConfig
from longspan.layers.dropout import GrowingDropout, dropout, hashed_dropout
from longspan.models import build


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


@pytest.mark.parametrize(
    ("number", "expected"), [(0, 0.1), (2, 0.1), (3, 0.125), (10, 0.3), (18, 0.5), (99, 0.5)]
)
def test_it_grows_with_passes_through_the_text(number: int, expected: float) -> None:
    torch.manual_seed(0)
    growing = GrowingDropout(0.1, 0.5)
    growing.begin_epoch(number)
    assert growing.probability.item() == pytest.approx(expected)
    x = torch.ones(300, 1000)
    for out in (dropout(x, growing, training=True), hashed_dropout(x, growing.probability)):
        assert (out == 0).float().mean().item() == pytest.approx(expected, abs=0.003)
        torch.testing.assert_close(out.amax(), 1 / (1 - growing.probability))
    assert dropout(x, growing, training=False) is x


def test_a_model_drops_more_where_it_has_read_more() -> None:
    config = ModernConfig(
        num_layers=2,
        width=16,
        num_heads=2,
        inner_width=32,
        repeat_dropout=0.5,
        span=SpanConfig(limit=16, ramp=4),
    )
    torch.manual_seed(0)
    model, tokens_BT = build(config, vocabulary_size=30), torch.randint(30, (2, 12))
    with torch.no_grad():
        for parameter in model.parameters():  # what adds to the residual begins at zero
            parameter.normal_(std=0.2)

    def read(number: int) -> Tensor:
        model.begin_epoch(number)
        return model(tokens_BT, model.initial_state(2))[0]

    expected = model.eval()(tokens_BT, model.initial_state(2))[0]
    model.train()
    assert torch.equal(read(0), expected)
    assert not torch.allclose(read(20), expected)
    assert torch.equal(read(2), expected)


def test_what_grows_from_nothing_drops_nothing_before() -> None:
    growing = GrowingDropout(0.0, 0.5)
    x = torch.randn(64, 64)
    assert torch.equal(hashed_dropout(x, growing.probability), x)
    before = torch.get_rng_state()
    assert torch.equal(dropout(x, growing, training=True), x)
    assert torch.equal(torch.get_rng_state(), before)
