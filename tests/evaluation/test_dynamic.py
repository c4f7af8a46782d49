"""Dynamic evaluation: no token is seen before it is scored, the rules by hand, the model stays as it is."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from longspan.config import EvaluationConfig, RunConfig
from longspan.data import token_array
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.errors import UserError
from longspan.evaluation import DynamicScore, dynamic_evaluation
from longspan.evaluation.dynamic import _adapted_weights, adapting, mean_squares
from longspan.evaluation.dynamic_rules import Rms, Sgd
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
        training=token_array(TEXT[::-1].copy(), tokenizer),
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


@pytest.mark.parametrize(("rule", "rate", "decay"), [("sgd", 0.1, 0.0), ("rms", 1e-4, 1e-3)])
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
def test_mean_squares_are_those_of_single_blocks(lanes: int) -> None:
    model = tiny_model()
    weights = _adapted_weights(model)
    found = mean_squares(model, weights, TEXT, lanes, 8, "cpu", most=3)
    expected = [torch.zeros_like(weight) for weight in weights]
    starts = np.linspace(0, len(TEXT) - 17, 3 * lanes).astype(int)
    for starts_of_block in starts.reshape(lanes, 3).T:  # a lane is a part of the text
        text = torch.from_numpy(np.stack([TEXT[start : start + 17] for start in starts_of_block]))
        with torch.no_grad():
            _, state = model(text[:, :8], model.initial_state(lanes))
        hidden, _ = model(text[:, 8:16], state)
        gradients = torch.autograd.grad(model.head.nll(hidden, text[:, 9:]).mean(), weights)
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient**2 / 3
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-12)


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
        mean_squares(tiny_model(), [], TEXT[:12], 1, 8, "cpu")
