"""How a search moves its parameters, and by what it is judged."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from longspan.config import RunConfig
from longspan.errors import UserError
from longspan.evaluation import Score
from longspan.layers.gumbel_block import GumbelBlock
from longspan.models import Supernet
from longspan.search import Searching
from longspan.training import Strategy
from longspan.training.step import Updater

from .searches import VOCABULARY, search_config, tiny_supernet

NOWHERE = Path("nowhere.txt")  # these tests read no text


def config(**changes: Any) -> RunConfig:
    return search_config(NOWHERE, **changes)


def held(optimizers: list[torch.optim.Optimizer]) -> list[int]:
    return [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "muon", "lamb"])
@pytest.mark.parametrize("updates", ["together", "alternate"])
def test_every_parameter_is_held_once(optimizer: str, updates: str) -> None:
    settings = config(updates=updates, stage__0__optimizer=optimizer)
    model = tiny_supernet(settings)
    method = Searching(model, settings)
    method.begin_stage(settings.stage[0])
    assert sorted(held(method.optimizers)) == sorted(id(p) for p in model.parameters())
    assert len(model.architecture_parameters()) == 3
    if updates == "alternate":
        *weights, architecture = method.optimizers
        assert held([architecture]) == [id(p) for p in model.architecture_parameters()]
        assert sorted(held(weights)) == sorted(id(p) for p in model.weight_parameters())
        assert architecture.param_groups[0]["lr"] == 0.1
    else:
        assert held(method.optimizers) == held(method.moving(1, 1.0))


def test_whose_turn_it_is() -> None:
    settings = config(search__architecture_every=3, search__warm_up_steps=4)
    method = Searching(tiny_supernet(settings), settings)
    method.begin_stage(settings.stage[0])
    *weights, architecture = method.optimizers
    turns = [method.moving(step, 0.5) for step in range(1, 15)]
    assert all(turn in ([architecture], weights) for turn in turns)
    assert [step for step, turn in enumerate(turns, 1) if turn == [architecture]] == [7, 10, 13]
    assert weights[0].param_groups[0]["lr"] == settings.stage[0].learning_rate * 0.5
    assert architecture.param_groups[0]["lr"] == 0.1, "the schedule of the stage is that of the weights"


def test_the_optimizer_of_the_architecture_outlives_a_stage() -> None:
    settings = config()
    method = Searching(tiny_supernet(settings), settings)
    method.begin_stage(settings.stage[0])
    before = method.optimizers
    method.begin_stage(settings.stage[1])
    assert method.optimizers[-1] is before[-1]
    assert method.optimizers[0] is not before[0]


def snapshots(model: Supernet, settings: RunConfig, steps: int) -> list[list[list[Tensor]]]:
    """[architecture, weights] before the first step and after every one."""
    method, updater = Searching(model, settings), Updater(model)
    method.begin_stage(settings.stage[0])
    groups = model.architecture_parameters(), model.weight_parameters()
    seen = [[[p.detach().clone() for p in group] for group in groups]]
    state = model.initial_state(2)
    for step in range(1, steps + 1):
        tokens_BT = torch.randint(VOCABULARY, (2, 9))
        optimizers = method.moving(step, 1.0)
        _, state = updater.update(tokens_BT[:, :-1], tokens_BT[:, 1:], state, optimizers, clip_norm=0.5)
        seen.append([[p.detach().clone() for p in group] for group in groups])
    return seen


def moved(before: list[Tensor], after: list[Tensor]) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_by_turns_a_step_moves_one_of_the_two() -> None:
    settings = config(search__architecture_every=2, search__warm_up_steps=2)
    seen = snapshots(tiny_supernet(settings), settings, 6)
    changes = [
        (moved(before[0], after[0]), moved(before[1], after[1])) for before, after in itertools.pairwise(seen)
    ]
    weights, architecture = (False, True), (True, False)
    assert changes == [weights, weights, weights, architecture, weights, architecture]


def test_together_a_step_moves_both() -> None:
    settings = config(updates="together")
    first, second = snapshots(tiny_supernet(settings), settings, 1)
    assert moved(first[0], second[0])
    assert moved(first[1], second[1])


def test_gradients_of_what_stands_still_shorten_no_step() -> None:
    """The norm of the weights' gradients, far above the limit, is none of the architecture's business."""
    settings = config()
    model = tiny_supernet(settings)
    for _ in range(2):  # the first leaves gradients behind
        model.zero_grad(set_to_none=False)
        sgd = torch.optim.SGD(model.architecture_parameters(), lr=1.0)
        before = [p.detach().clone() for p in model.architecture_parameters()]
        tokens_BT = torch.randint(VOCABULARY, (2, 9))
        for weight in model.weight_parameters():
            weight.grad = torch.full_like(weight, 1e6)
        Updater(model).update(tokens_BT[:, :-1], tokens_BT[:, 1:], model.initial_state(2), [sgd], 1e-3)
        steps = [a - b for a, b in zip(model.architecture_parameters(), before, strict=True)]
        assert torch.stack([step.norm() for step in steps]).norm().item() == pytest.approx(1e-3, rel=1e-2)


def test_the_hard_score_decides_and_the_soft_one_is_beside_it() -> None:
    settings = config()
    model = tiny_supernet(settings)
    chosen: list[list[str | None]] = []

    def score() -> Score:
        chosen.append([cast(GumbelBlock, block).chosen for block in model.blocks])
        return cast(Score, f"score {len(chosen)}")

    judge: Callable[..., Any] = Searching(model, settings).judge
    assert judge(score) == ("score 1", {"soft": "score 2"})
    assert chosen == [list(model.pattern()), [None, None, None]]


def test_each_way_of_training_refuses_the_other() -> None:
    search = config()
    with pytest.raises(UserError, match=r"hunt is a search.*use 'longspan search'"):
        Strategy.check(search)
    Searching.check(search)
    plain = replace(search, search=None)
    with pytest.raises(UserError, match=r"hunt is not a search.*use 'longspan train'"):
        Searching.check(plain)
    Strategy.check(plain)
