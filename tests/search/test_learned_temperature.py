"""A temperature that is a parameter of the search."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.config import SearchConfig
from longspan.layers.gumbel_block import GumbelBlock
from longspan.layers.identity import Identity
from longspan.layers.temperature import LearnedTemperature
from longspan.search import Searching
from longspan.state import State
from longspan.training import resume, train
from longspan.training.step import Updater

from ..training.runs import metrics, outcome
from ..training.test_resume import Dies
from .searches import VOCABULARY, search_config, tiny_supernet

NOWHERE = Path("nowhere.txt")
LEARNED: dict[str, Any] = {"search__temperature_schedule": "learned", "search__temperature_start": 2.0}


class Double(Identity):
    def forward(self, h, state):
        return 2 * h, state


def test_the_gradient_of_the_temperature_by_hand():
    temperature = LearnedTemperature(SearchConfig(temperature_start=2.0)).double()
    block = GumbelBlock({"i": Identity(), "d": Double()}, temperature, "soft").double().eval()
    with torch.no_grad():
        block.logits_K.copy_(torch.tensor([0.3, -0.9]))
    h = torch.ones(1, 1, 1, dtype=torch.float64)
    out, _ = block(h, State({"i": State({}), "d": State({})}))
    p = 1 / (1 + math.exp(1.2 / 2.0))  # of doubling: logits 1.2 apart, at temperature 2
    assert out.item() == pytest.approx(1 + p)
    out.sum().backward()
    # d p / d log tau = p (1 - p) * 1.2 / tau
    assert temperature.log_tau.grad.item() == pytest.approx(p * (1 - p) * 1.2 / 2.0)


@pytest.mark.parametrize("updates", ["together", "alternate"])
def test_it_moves_with_the_architecture_and_stays_above_its_least(updates):
    settings = search_config(NOWHERE, updates=updates, **LEARNED)
    model = tiny_supernet(settings)
    strategy, updater, state = Searching(model, settings), Updater(model), model.initial_state(2)
    strategy.begin_stage(settings.stage[0])
    temperature = model.shared["temperature"]
    assert temperature.log_tau is model.architecture_parameters()[-1]
    assert len(model.architecture_parameters()) == 4
    seen = [temperature().item()]
    for step in range(1, 11):
        tokens = torch.randint(VOCABULARY, (2, 9))
        _, state = updater.update(tokens[:, :-1], tokens[:, 1:], state, strategy.moving(step, 1.0), 0.5)
        seen.append(temperature().item())
    assert seen[0] == pytest.approx(2.0)
    assert len({*seen}) == (11 if updates == "together" else 3)  # by turns: steps 7 and 10
    with torch.no_grad():
        temperature.log_tau.fill_(-9.0)
    model.after_update()
    assert model.diagnostics()["temperature"].item() == pytest.approx(0.1)


def test_the_temperature_is_not_decayed():
    settings = search_config(NOWHERE, **LEARNED, search__architecture_weight_decay=0.5)
    model = tiny_supernet(settings)
    strategy = Searching(model, settings)
    *_, adam = strategy.optimizers
    decays = {id(p): group["weight_decay"] for group in adam.param_groups for p in group["params"]}
    *logits, log_tau = model.architecture_parameters()
    assert decays[id(log_tau)] == 0.0
    assert {decays[id(p)] for p in logits} == {0.5}


def test_a_killed_search_resumes_exactly(text: Path, tmp_path: Path):
    settings = search_config(text, **LEARNED)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(settings, whole, strategy=Searching)
    with pytest.raises(MemoryError):
        train(settings, stopped, reporter=Dies("step 12 "), strategy=Searching)
    resume(stopped, strategy=Searching)
    assert outcome(stopped) == outcome(whole)
    found = {line["temperature"] for line in metrics(whole) if "temperature" in line}
    assert len(found) > 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"temperature_start": 0.05}, "temperature_start, 0.05, must not be below temperature_end, 0.1"),
        ({"anneal_steps": 9}, "anneal_steps has no effect on a learned temperature"),
    ],
)
def test_options_that_make_no_sense(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        SearchConfig(temperature_schedule="learned", **options)
