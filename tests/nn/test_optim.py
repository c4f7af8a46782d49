"""The optimizers of `longspan.optim` as plain torch optimizers; tests/training has their formulas."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import longspan
from longspan.errors import UserError
from longspan.optim import Adagrad, Lamb, Muon, NorMuon

Make = Callable[[Any], Optimizer]
MAKERS: dict[str, Make] = {
    "adagrad": partial(Adagrad, lr=0.1, clip=0.5),
    "lamb": partial(Lamb, lr=0.1, weight_decay=0.01),
    "muon": partial(Muon, lr=0.1, weight_decay=0.01),
    "normuon": partial(NorMuon, lr=0.1, weight_decay=0.01, cautious=True),
}
X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
Y = X @ torch.randn(4, 3, generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


def linear(make: Make) -> nn.Linear:
    torch.manual_seed(4)
    return nn.Linear(4, 3, bias=make not in (MAKERS["muon"], MAKERS["normuon"]))


def step(model: nn.Module, optimizer: Optimizer) -> float:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(X) - Y).square().mean()
        loss.backward()
        return loss

    loss: torch.Tensor = optimizer.step(closure)  # type: ignore[arg-type, assignment]
    return loss.item()


def test_over_the_parameters_of_a_plain_model_with_a_closure(make: Make) -> None:
    model = linear(make)
    optimizer = make(model.parameters())
    losses = [step(model, optimizer) for _ in range(60)]
    assert losses[-1] < 0.2 * losses[0]


def test_a_step_without_a_closure_is_the_same(make: Make) -> None:
    one, other = linear(make), linear(make)
    step(one, make(one.parameters()))
    optimizer = make(other.parameters())
    (other(X) - Y).square().mean().backward()
    assert optimizer.step() is None  # type: ignore[func-returns-value]
    assert torch.equal(one.weight, other.weight)


def test_state_dict_round_trip(make: Make) -> None:
    model = linear(make)
    optimizer = make(model.parameters())
    for _ in range(3):
        step(model, optimizer)
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], buffer)
    expected = [step(model, optimizer) for _ in range(3)]
    buffer.seek(0)
    weights, state = torch.load(buffer, weights_only=True)
    restored = linear(make)
    restored.load_state_dict(weights)
    again = make(restored.parameters())
    again.load_state_dict(state)
    assert [step(restored, again) for _ in range(3)] == expected


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_go_on_alike(make: Make, copied: Callable[[Any], Any]) -> None:
    model = linear(make)
    optimizer = make(model.parameters())
    step(model, optimizer)
    other, its = copied((model, optimizer))
    assert [step(other, its) for _ in range(3)] == [step(model, optimizer) for _ in range(3)]


def test_schedulers_of_torch(make: Make) -> None:
    model = linear(make)
    optimizer = make(model.parameters())
    scheduler = lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2),
            lr_scheduler.CosineAnnealingLR(optimizer, 2),
        ],
        [2],
    )
    rates, moves = [], []
    for _ in range(5):
        before = model.weight.clone()
        step(model, optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
        moves.append(float((model.weight - before).detach().norm()))
        scheduler.step()
    assert rates == pytest.approx([0.05, 0.075, 0.1, 0.05, 0.0], abs=1e-9)
    assert min(moves[:4]) > 0
    assert moves[4] == pytest.approx(0, abs=1e-6)


def test_groups_with_rates_of_their_own(make: Make) -> None:
    moving, still = linear(make), linear(make)
    optimizer = make([{"params": moving.parameters()}, {"params": still.parameters(), "lr": 0.0}])
    before = still.weight.clone()
    (moving(X) + still(X)).square().mean().backward()
    optimizer.step()
    assert torch.equal(still.weight, before)
    assert not torch.equal(moving.weight, before)


def test_muon_names_what_is_no_matrix() -> None:
    with pytest.raises(UserError, match=r"^Muon updates matrices, .* shape \[3\]: give vectors"):
        Muon(nn.Linear(4, 3).parameters(), lr=0.1)
    with pytest.raises(UserError, match=r"^NorMuon updates matrices, .* shape \[3\]: give vectors"):
        NorMuon(nn.Linear(4, 3).parameters(), lr=0.1)


def test_a_muon_that_was_saved_without_cautious_decay_goes_on() -> None:
    model = linear(MAKERS["muon"])
    optimizer = Muon(model.parameters(), lr=0.1)
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["cautious"]
    optimizer.load_state_dict(saved)
    step(model, optimizer)
    assert optimizer.param_groups[0]["cautious"] is False


def test_they_are_names_of_the_package() -> None:
    names = ("Adagrad", "Lamb", "Muon", "NorMuon")
    assert [getattr(longspan.optim, name) for name in names] == [Adagrad, Lamb, Muon, NorMuon]
    assert all(hasattr(longspan.nn, name) for name in longspan.nn.__all__)
