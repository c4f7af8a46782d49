"""Dynamic evaluation: no token is seen before it is scored, the rules by hand, the model stays as it is."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from longspan.config import EvaluationConfig, RunConfig
from longspan.data import token_array
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.errors import UserError
from longspan.evaluation import DynamicScore, dynamic, dynamic_evaluation
from longspan.evaluation.dynamic import _adapted_weights, adapting, statistics_plans
from longspan.evaluation.dynamic_rules import Rms, Sgd, Squares
from longspan.evaluation.protocols import EvaluationPlan, Lane, every_token
from longspan.models import LanguageModel, build_run
from tests.models.test_contract import VARIANTS, VOCABULARY
from tests.using.tiny import tiny_model

TEXT = np.tile(np.random.default_rng(0).integers(32, 64, 25), 5)  # repeats, so that adapting pays


def score(model: LanguageModel, rule: Any = "sgd", tokens: np.ndarray = TEXT, **options: Any) -> DynamicScore:
    tokenizer = ByteTokenizer()
    return dynamic_evaluation(
        model,
        token_array(tokens, tokenizer),
        tokenizer=tokenizer,
        config=EvaluationConfig(batch_size=options.pop("batch_size", 2)),
        block_length=8,
        rule=rule,
        training=token_array(TEXT[::-1][: options.pop("training_tokens", None)].copy(), tokenizer),
        device="cpu",
        **options,
    )


def nats_of_blocks(tokens: np.ndarray, rate: float = 0.5, lanes: int = 2) -> list[float]:
    model = copy.deepcopy(tiny_model())
    weights = _adapted_weights(model)
    plan = every_token(len(tokens), lanes, 8)
    rule = Sgd(weights, rate, 0.01)
    return [float(nats) for nats in adapting(model, rule, weights, tokens, plan, 8, "cpu")]


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_future_changes_no_earlier_score(lanes: int) -> None:
    plain = nats_of_blocks(TEXT, lanes=lanes)
    plan = every_token(len(TEXT), lanes, 8)
    for block in (0, 5):
        changed = TEXT.copy()
        for lane in plan.lanes:  # after what the block scores, but not the first token of the next lane
            later = changed[lane.start + 8 * (block + 1) + 1 : lane.start + lane.length]
            later[:] = np.random.default_rng(1).permutation(later)
        found = nats_of_blocks(changed, lanes=lanes)
        assert found[: block + 1] == plain[: block + 1]
        assert found[block + 1] != plain[block + 1]


def test_a_step_changes_the_scores_after_it_only() -> None:
    moved, still = nats_of_blocks(TEXT), nats_of_blocks(TEXT, rate=0.0)
    assert moved[0] == still[0]
    assert all(one != other for one, other in zip(moved[1:], still[1:], strict=True))


def test_lanes_of_unequal_length_by_hand() -> None:
    """A step is on the mean over all targets of a block. The state is the one from before the step."""
    lanes = Lane(0, 29), Lane(40, 11), Lane(60, 20)
    plan = EvaluationPlan(lanes, 60, "")
    model, rate, decay = copy.deepcopy(tiny_model()), 0.5, 0.1
    weights = _adapted_weights(model)
    found = list(adapting(model, Sgd(weights, rate, decay), weights, TEXT, plan, 8, "cpu"))

    model = copy.deepcopy(tiny_model())
    weights = _adapted_weights(model)
    trained = [weight.detach().clone() for weight in weights]
    states = [model.initial_state(1) for _ in lanes]
    for begin, nats_of_block in zip(range(0, 29, 8), found, strict=True):
        nats, targets = torch.zeros(()), 0
        for number, lane in enumerate(lanes):
            text = torch.from_numpy(TEXT[lane.start + begin : lane.start + min(begin + 8, lane.length) + 1])
            if len(text) > 1:
                hidden, after = model(text[None, :-1], states[number])
                nats = nats + model.head.nll(hidden, text[None, 1:]).sum()
                targets += len(text) - 1
                states[number] = after.detach()
        assert float(nats_of_block) == pytest.approx(nats.item(), rel=1e-5)
        gradients = torch.autograd.grad(nats / targets, weights, materialize_grads=True)
        with torch.no_grad():
            for weight, first, gradient in zip(weights, trained, gradients, strict=True):
                weight += decay * (first - weight) - rate * gradient
        model.refresh()


@pytest.mark.parametrize(("rule", "rate", "decay"), [("sgd", 0.05, 0.0), ("rms", 1e-4, 1e-3)])
def test_defaults_are_those_of_the_documentation(rule: str, rate: float, decay: float) -> None:
    found = score(tiny_model(), rule)
    assert (found.rate, found.decay) == (rate, decay)


@pytest.mark.parametrize("rule", ["sgd", "rms"])
def test_rate_zero_is_the_static_score_bit_for_bit(rule: str) -> None:
    found = score(tiny_model(), rule, rate=0.0, decay=0.3)
    assert found.dynamic == found.static
    assert found.steps == 8


@pytest.mark.parametrize("rule", ["sgd", "rms"])
def test_it_pays_on_text_that_repeats_and_the_model_stays(rule: str) -> None:
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    found = score(model, rule, rate={"sgd": 0.5, "rms": 0.002}[rule], decay=0.0)
    assert found.dynamic.bits_per_byte < 0.97 * found.static.bits_per_byte
    assert (found.dynamic.tokens, found.dynamic.bytes) == (found.static.tokens, found.static.bytes)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    figures = found.figures()
    assert figures["dynamic"]["bits_per_byte"] == found.dynamic.bits_per_byte
    assert figures["rule"] == rule


def test_full_decay_forgets_every_step() -> None:
    """theta_0 - eta g: what an earlier block taught is gone."""
    model = copy.deepcopy(tiny_model())
    weights = _adapted_weights(model)
    rule = Sgd(weights, 0.1, 1.0)
    start = [weight.detach().clone() for weight in weights]
    for _ in range(2):
        rule.step([torch.ones_like(weight) for weight in weights])
    for weight, first in zip(weights, start, strict=True):
        assert torch.allclose(weight, first - 0.1, atol=1e-7)


def test_the_rms_rule_by_hand() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0])
    rule = Rms([weight], 0.5, 0.25, [torch.tensor([4.0, 16.0, 0.0])], epsilon=1.0)
    # roots 2, 4, 0; their mean over weights with a gradient: 3
    rule.step([torch.tensor([1.0, 1.0, 1.0])])
    assert weight.tolist() == pytest.approx([1 - 0.5 / 5, 2 - 0.5 / 7, 3 - 0.5 / 3])
    moved = weight.clone()
    rule.step([torch.zeros(3)])
    shares = torch.tensor([0.25 * 2 / 3, 0.25 * 4 / 3, 0.0])
    assert torch.allclose(weight, moved + shares * (torch.tensor([1.0, 2.0, 3.0]) - moved))
    strong = Rms([weight], 0.0, 9.0, [torch.tensor([4.0, 16.0, 0.0])])
    assert strong.decays[0].tolist() == [1.0, 1.0, 0.0]  # never beyond the trained weights


@pytest.mark.parametrize("lanes", [1, 2])
def test_squares_of_gradients_of_the_training_text_by_hand(
    lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two places a lane, far apart; one block that fills the state, then two with gradients."""
    monkeypatch.setattr(dynamic, "STATISTICS_WARM", 5)  # a whole block
    monkeypatch.setattr(dynamic, "STATISTICS_BLOCKS", 2)
    monkeypatch.setattr(dynamic, "STATISTICS_PLACES", 2)
    model = copy.deepcopy(tiny_model())
    weights = _adapted_weights(model)
    plans = statistics_plans(len(TEXT), lanes, 8)
    starts = [[lane.start for lane in plan.lanes] for plan in plans]
    assert starts == {1: [[0], [100]], 2: [[0, 66], [33, 100]]}[lanes]
    squares = Squares(weights)
    for plan in plans:
        list(adapting(model, squares, weights, TEXT, plan, 8, "cpu"))

    expected = [torch.zeros_like(weight) for weight in weights]
    for starts_of_place in starts:
        text = torch.from_numpy(np.stack([TEXT[start : start + 25] for start in starts_of_place]))
        with torch.no_grad():
            _, state = model(text[:, :8], model.initial_state(lanes))
        for begin in (8, 16):
            hidden, after = model(text[:, begin : begin + 8], state)
            loss = model.head.nll(hidden, text[:, begin + 1 : begin + 9]).mean()
            for total, gradient in zip(expected, torch.autograd.grad(loss, weights), strict=True):
                total += gradient**2 / 4
            state = after.detach()
    for one, other in zip(squares.means(), expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 30_000), st.integers(1, 5), st.integers(1, 700))
def test_gradients_are_taken_inside_the_training_text(num_tokens: int, lanes: int, block: int) -> None:
    assume((num_tokens - 1) // lanes >= 2 * block)
    plans = statistics_plans(num_tokens, lanes, block)
    assert 1 <= len(plans) <= 8
    for plan in plans:
        assert len(plan.lanes) == lanes
        for lane in plan.lanes:
            assert 0 <= lane.start <= num_tokens - 1 - lane.length
            assert lane.warm % block == lane.length % block == 0
            assert lane.length - lane.warm > 0
            assert lane.warm >= min(4096, lane.length // 2 - block)
    first = sorted(lane.start for plan in plans for lane in plan.lanes)
    assert all(b - a >= plans[0].longest for a, b in itertools.pairwise(first))


def test_spans_stay() -> None:
    model = tiny_model()
    spans = {id(parameter) for parameter in model.optimizer_groups()["span"]}
    assert spans
    assert not spans & {id(weight) for weight in _adapted_weights(model)}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_architecture(name: str) -> None:
    torch.manual_seed(0)
    model = build_run(RunConfig(model=VARIANTS[name]), VOCABULARY).eval()
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 41)
    still = score(model, "sgd", tokens, rate=0.0)
    assert still.dynamic.nats == still.static.nats
    moved = score(model, "sgd", tokens, rate=0.1)
    assert moved.static.nats == still.static.nats
    assert moved.dynamic.nats != still.static.nats


def test_too_little_training_text() -> None:
    with pytest.raises(UserError, match="12 tokens of training text are too few for 1 lanes of blocks of 8"):
        statistics_plans(12, 1, 8)


def test_the_training_text_is_checked_and_read_first() -> None:
    """A mistake shows before the text is scored."""
    told: list[tuple[int, int]] = []
    with pytest.raises(UserError, match="too few for 2 lanes"):
        score(tiny_model(), "rms", batch_size=2, training_tokens=20, progress=lambda *done: told.append(done))
    assert told == []
    found = score(tiny_model(), "rms", progress=lambda *done: told.append(done))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert {total for _, total in told} == {told[-1][0]}
    assert told[0][0] > 0
    assert found.statistics_seconds > 0
