"""The supernet of the PAR search: what it mixes, what it learns, and what it becomes."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from longspan.config import (
    AdaptiveSpanConfig,
    RunConfig,
    SearchConfig,
    SpanConfig,
    StageConfig,
    TrainingConfig,
    TransformerXLConfig,
)
from longspan.errors import UserError
from longspan.layers.gumbel_block import GumbelBlock
from longspan.models import Supernet, build, build_run
from longspan.models.latency import block_seconds, measure_costs

VOCABULARY = 11
XL = TransformerXLConfig(width=8, num_heads=2, inner_width=12, memory_length=6)
SPANS = AdaptiveSpanConfig(
    width=8, num_heads=2, inner_width=12, span=SpanConfig(limit=20, ramp=3, start=0.3, penalty=0.01)
)
STEPS = 10


def run_config(model: TransformerXLConfig | AdaptiveSpanConfig = XL, **search) -> RunConfig:
    return RunConfig(
        model=model,
        search=SearchConfig(**{"num_blocks": 4, **search}),
        training=TrainingConfig(batch_size=2, block_length=5),
        stage=(StageConfig(steps=STEPS, learning_rate=0.1),),
    )


def make(model: TransformerXLConfig | AdaptiveSpanConfig = XL, **search) -> Supernet:
    """In double precision, and with a mind of its own."""
    torch.manual_seed(3)
    made = build_run(run_config(model, **search), VOCABULARY).double()
    assert isinstance(made, Supernet)
    with torch.no_grad():
        for logits_K in made.architecture_parameters():
            logits_K.copy_(torch.randn_like(logits_K))
    return made


def tokens(length: int = 5) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(5))


def first_block(model: Supernet) -> GumbelBlock:
    block = model.blocks[0]
    assert isinstance(block, GumbelBlock)
    return block


def candidates_of(block: GumbelBlock, h_BTD: Tensor) -> Tensor:
    state = block.initial_state(len(h_BTD))
    return torch.stack([one(h_BTD, state.branch(name))[0] for name, one in block.candidates.items()])


def weights_with_noise(block: GumbelBlock, tau: float, seed: int) -> Tensor:
    torch.manual_seed(seed)
    gumbel_K = -torch.empty_like(block.logits_K).exponential_().log()
    return torch.softmax((block.logits_K + gumbel_K) / tau, dim=0)


@pytest.mark.parametrize("schedule", ["learned", "constant", "linear", "exponential"])
def test_only_a_schedule_that_anneals_needs_the_number_of_steps(schedule):
    in_epochs = (StageConfig(steps=None, epochs=2, learning_rate=0.1),)
    config = dataclasses.replace(run_config(temperature_schedule=schedule), stage=in_epochs)
    if schedule in ("learned", "constant"):
        assert isinstance(build_run(config, VOCABULARY), Supernet)
        return
    with pytest.raises(UserError, match=r"given in epochs: give search\.anneal_steps, too"):
        build_run(config, VOCABULARY)


def test_candidates_in_half_precision_are_mixed_in_full():
    """What the logits learn is a difference of sums that half precision would round away."""
    model = make().float().eval()
    block, h_BTD = first_block(model), 3 + torch.randn(2, 5, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out_BTD, _ = block(h_BTD, block.initial_state(2))
        each_KBTD = candidates_of(block, h_BTD).detach().double()
    dout_BTD = torch.randn(2, 5, 8) + 30
    (found_K,) = torch.autograd.grad(out_BTD, block.logits_K, dout_BTD.to(out_BTD.dtype))
    logits_K = block.logits_K.detach().double().requires_grad_()
    w_K = (logits_K / block._temperature[0]()).softmax(dim=0)
    mixed_BTD = torch.einsum("k,kbtd->btd", w_K, each_KBTD)
    (expected_K,) = torch.autograd.grad(mixed_BTD, logits_K, dout_BTD.double())
    torch.testing.assert_close(out_BTD, mixed_BTD.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_K, expected_K.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("updates", [0, 4])
def test_a_soft_block_is_the_weighted_sum(updates):
    model = make().train()
    for _ in range(updates):
        model.after_update()
    block, h_BTD = first_block(model), torch.randn(2, 5, 8, dtype=torch.double)
    w_K = weights_with_noise(block, 0.1 ** (updates / STEPS), seed=7)
    expected = sum(w * out for w, out in zip(w_K, candidates_of(block, h_BTD), strict=True))
    torch.manual_seed(7)
    found, _ = block(h_BTD, block.initial_state(2))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # the temperature is a float32


def test_straight_through_is_one_candidate_with_the_gradient_of_the_mixture():
    soft, hard = make().train(), make(sampling="straight-through").train()
    h_BTD = torch.randn(2, 5, 8, dtype=torch.double)
    push_BTD = torch.randn_like(h_BTD)
    block = first_block(hard)
    for seed in range(4):  # not always the same candidate
        chosen = int(weights_with_noise(block, 1.0, seed).argmax())
        torch.manual_seed(seed)
        out_BTD, _ = block(h_BTD, block.initial_state(2))
        assert torch.equal(out_BTD, candidates_of(block, h_BTD)[chosen])
        (found_K,) = torch.autograd.grad((out_BTD * push_BTD).sum(), [block.logits_K])
        torch.manual_seed(seed)
        mixed_BTD, _ = first_block(soft)(h_BTD, block.initial_state(2))
        (expected_K,) = torch.autograd.grad((mixed_BTD * push_BTD).sum(), [first_block(soft).logits_K])
        torch.testing.assert_close(found_K, expected_K)
        assert found_K.abs().max() > 0


def test_in_evaluation_there_is_no_noise():
    model = make().eval()
    block, h_BTD = first_block(model), torch.randn(2, 5, 8, dtype=torch.double)
    expected = torch.einsum("k,kbtd->btd", block.logits_K.softmax(0), candidates_of(block, h_BTD))
    before = torch.random.get_rng_state()
    torch.testing.assert_close(block(h_BTD, block.initial_state(2))[0], expected)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        ("exponential", [2.0, 2.0 * 0.25**0.5, 0.5, 0.5]),
        ("linear", [2.0, 1.25, 0.5, 0.5]),
        ("constant", [2.0, 2.0, 2.0, 2.0]),
    ],
)
def test_the_temperature_falls_as_scheduled(schedule, values):
    search = {"temperature_start": 2.0, "temperature_end": 0.5, "temperature_schedule": schedule}
    for anneal_steps in (None, 4):
        model = make(**search, anneal_steps=anneal_steps)
        steps = anneal_steps or STEPS
        seen = []
        for _ in range(2 * steps):
            seen.append(model.diagnostics()["temperature"].item())
            model.after_update()
        assert [seen[0], seen[steps // 2], seen[steps], seen[-1]] == pytest.approx(values)


def test_the_count_of_updates_is_saved_and_loading_is_no_update():
    model, twin = make(), make()
    for _ in range(3):
        model.after_update()
    twin.load_state_dict(model.state_dict())
    assert twin.diagnostics()["temperature"] == model.diagnostics()["temperature"] != 1.0
    twin.after_update()
    assert twin.diagnostics()["temperature"].item() == pytest.approx(0.1 ** (4 / STEPS))


@pytest.mark.parametrize("config", [XL, SPANS, dataclasses.replace(SPANS, norm="pre")])
def test_hard_evaluation_is_the_plain_model_of_the_pattern(config):
    model = make(config).eval()
    pattern = model.pattern()
    assert len(set(pattern)) > 1
    plain = build(dataclasses.replace(config, pattern=pattern), VOCABULARY).double().eval()
    weights = model.state_dict()
    for number, letter in enumerate(pattern):
        for name in list(weights):
            inside = f"blocks.{number}.candidates.{letter}."
            if name.startswith(inside):
                weights[f"blocks.{number}." + name[len(inside) :]] = weights[name]
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    state, plain_state = model.initial_state(2), plain.initial_state(2)
    with torch.no_grad(), model.evaluating("hard"):
        for block in tokens(15).split(5, dim=1):
            found, state = model(block, state)
            expected, plain_state = plain(block, plain_state)
            assert torch.equal(found, expected)


def test_hard_evaluation_runs_only_what_was_chosen():
    model, ran = make().eval(), []
    for block in model.blocks:
        for letter, candidate in block.candidates.items():
            candidate.register_forward_hook(lambda *_, letter=letter: ran.append(letter))
    with model.evaluating("hard"):
        model(tokens(), model.initial_state(2))
        assert "".join(ran) == model.pattern()
    ran.clear()
    model(tokens(), model.initial_state(2))
    assert len(ran) == 4 * 3


def test_the_state_has_one_shape_whatever_is_chosen():
    model = make().eval()
    state = model.initial_state(2)
    shapes = {name: leaf.shape for name, leaf in state.flatten().items()}
    _, soft = model(tokens(), state)
    with model.evaluating("hard"):
        _, hard = model(tokens(), soft)
    for after in (soft, hard):
        assert {name: leaf.shape for name, leaf in after.flatten().items()} == shapes


def test_without_attention_there_is_nothing_to_carry():
    model = make(candidates="fi").eval()
    assert not model.initial_state(2).flatten()
    assert model(tokens(), model.initial_state(2))[0].shape == (2, 5, 8)


def test_top_patterns_are_those_of_brute_force():
    model = make()
    p_BK = model.probabilities_BK().tolist()
    every = {
        "".join("sfi"[k] for k in choice): math.prod(p[k] for p, k in zip(p_BK, choice, strict=True))
        for choice in itertools.product(range(3), repeat=4)
    }
    expected = sorted(every.items(), key=lambda item: -item[1])
    for number in (1, 7, 1000):
        found = model.top_patterns(number)
        assert [pattern for pattern, _ in found] == [pattern for pattern, _ in expected[:number]]
        assert [p for _, p in found] == pytest.approx([p for _, p in expected[:number]])
    assert model.pattern() == expected[0][0]


def test_weights_and_architecture_together_are_all_parameters():
    model = make(SPANS)
    weights, architecture = model.weight_parameters(), model.architecture_parameters()
    assert len(architecture) == 4
    assert {id(p) for p in weights} | {id(p) for p in architecture} == {id(p) for p in model.parameters()}
    assert len(weights) + len(architecture) == len(list(model.parameters()))


def test_what_is_seen_inside():
    seen = make().diagnostics()
    assert seen["architecture_BK"].shape == (4, 3)
    torch.testing.assert_close(seen["architecture_BK"].sum(1), torch.ones(4, dtype=torch.double))
    assert not seen["architecture_BK"].requires_grad


def test_the_penalty_is_the_expected_cost():
    model = make(SPANS, cost_weight=0.5)
    assert model.costs_K[2] == 0 < model.costs_K[1]
    model.set_costs({"s": 8.0, "f": 4.0, "i": 0.0})
    p_BK = model.probabilities_BK()
    expected = 0.5 * (p_BK[:, 0] + p_BK[:, 1] / 2).mean()
    penalties = model.penalties()
    torch.testing.assert_close(penalties["search_cost"], expected)
    assert penalties.keys() == {"span", "search_cost"}
    penalties["search_cost"].backward()
    for logits_K in model.architecture_parameters():
        assert logits_K.grad is not None
        assert logits_K.grad[2] < 0 < logits_K.grad[0]  # away from attention, to identity
    assert "search_cost" not in make().penalties()


def test_latency_is_measured_and_leaves_no_trace():
    config = run_config(cost="latency", cost_weight=1.0)
    model = build_run(config, VOCABULARY)
    assert isinstance(model, Supernet)
    by_flops, random = model.costs_K.clone(), torch.random.get_rng_state()
    measure_costs(model, config)
    assert model.costs_K[0] > 0
    assert model.costs_K[1] > 0
    assert model.costs_K[2] == 0
    assert not torch.equal(model.costs_K, by_flops)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), random)
    measured = model.costs_K.clone()
    measure_costs(model, run_config())
    assert torch.equal(model.costs_K, measured)


def test_a_larger_block_takes_longer():
    small, large = (
        build(dataclasses.replace(XL, pattern="f", inner_width=width), VOCABULARY).blocks[0]
        for width in (8, 8192)
    )
    assert block_seconds(large, (4, 16, 8)) > block_seconds(small, (4, 16, 8))
