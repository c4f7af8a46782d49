"""Spans that depend on the input: their gradients, their penalty in a step, and what they learn."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from longspan.config import AdaptiveSpanConfig, SpanConfig
from longspan.hooks import add_penalty, added_penalties
from longspan.layers.dynamic_span import DynamicSpan
from longspan.models import LanguageModel, build
from longspan.state import State
from longspan.training.step import Updater

CONFIG = AdaptiveSpanConfig(
    num_layers=2,
    width=12,
    num_heads=3,
    inner_width=16,
    dropout=0.0,
    span=SpanConfig(kind="dynamic", limit=10, ramp=3, start=0.4, penalty=0.01),
)


def model_of(config: AdaptiveSpanConfig = CONFIG, vocabulary: int = 11) -> LanguageModel:
    torch.manual_seed(0)
    model = build(config, vocabulary)
    for module in model.modules():
        if isinstance(module, DynamicSpan):
            torch.nn.init.normal_(module.direction_HD, std=0.3)
    return model


def spans_of(model: LanguageModel) -> list[DynamicSpan]:
    return [module for module in model.modules() if isinstance(module, DynamicSpan)]


def block(model: LanguageModel, batch: int = 4, length: int = 7) -> tuple[Tensor, Tensor, State]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(11, (batch, length + 1), generator=draw)
    with torch.no_grad():
        _, state = model(torch.randint(11, (batch, 5), generator=draw), model.initial_state(batch))
    return tokens[:, :-1], tokens[:, 1:], state


def test_spans_by_hand():
    span = DynamicSpan.from_config(dataclasses.replace(CONFIG.span, limit=100, start=0.25), 2, 3)
    x_BTD = torch.randn(2, 4, 3)
    torch.testing.assert_close(span(x_BTD), torch.full((2, 2, 4), 25.0))
    with torch.no_grad():
        span.direction_HD.copy_(torch.tensor([[1.0, 0, 0], [0, -2.0, 0]]))
        span.bias_H.copy_(torch.tensor([0.5, 0.0]))
    expected = torch.stack([x_BTD[..., 0] + 0.5, -2 * x_BTD[..., 1]], dim=1).sigmoid() * 100
    torch.testing.assert_close(span(x_BTD), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert span(x_BTD).dtype == torch.float32
    torch.testing.assert_close(span.penalty(expected), 0.01 * expected.mean())


@pytest.mark.parametrize(("start", "tokens"), [(0.0, 1.799), (1.0, 98.201)])
def test_a_start_at_an_end_can_still_learn(start, tokens):
    span = DynamicSpan.from_config(dataclasses.replace(CONFIG.span, limit=100, start=start), 1, 3)
    torch.testing.assert_close(
        span(torch.randn(1, 1, 3)).flatten(), torch.tensor([tokens]), atol=1e-3, rtol=0
    )


def test_a_penalty_ramps_in():
    span = DynamicSpan.from_config(dataclasses.replace(CONFIG.span, penalty_from=1, penalty_full=2), 3, 3)
    whole, found = 0.01 * 4.0, []
    for _ in range(4):
        found.append(span.penalty(torch.full((2, 3, 5), 4.0)).item())
        span.after_update()
    assert found == pytest.approx([0.0, whole / 2, whole, whole])


def test_gradients_of_the_loss_with_its_penalty_are_those_of_finite_differences():
    model = model_of().double().train()
    tokens, _, state = block(model)
    of_hidden = torch.randn(12, dtype=torch.float64)

    def loss() -> Tensor:
        with added_penalties() as added:
            hidden, _ = model(tokens, state)
        return (hidden @ of_hidden).square().mean() + torch.stack(added).sum()  # the head is in float32

    assert len(spans_of(model)) == 2
    weights = [weight for name, weight in model.named_parameters() if not name.startswith("head")]
    for weight, gradient in zip(weights, torch.autograd.grad(loss(), weights), strict=True):
        direction = torch.randn_like(weight)
        change = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                weight.add_(direction, alpha=step)
                change.append(loss())
                weight.sub_(direction, alpha=step)
        slope = (change[0] - change[1]) / 2e-6
        torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-5, atol=1e-8)


def test_micro_batches_add_up_to_the_whole_batch():
    found = []
    for micro_batches in (1, 3):
        model = model_of().double().train()
        tokens, targets, state = block(model)
        Updater(model, micro_batches=micro_batches).gradients(tokens, targets, state)
        found.append([weight.grad for weight in model.parameters()])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-6, atol=1e-9)


def test_a_step_has_the_penalty_and_evaluation_has_none():
    """Of one query per text, the mean span of a layer is that of its heads."""
    without = dataclasses.replace(CONFIG, span=dataclasses.replace(CONFIG.span, penalty=0.0))
    gradients = []
    for config in (CONFIG, without):
        model = model_of(config).train()
        tokens, targets, state = block(model)
        Updater(model).gradients(tokens, targets, state)
        gradients.append(spans_of(model)[1].bias_H.grad)
    span, x = spans_of(model)[1], {}
    span.register_forward_hook(lambda _, inputs, __: x.update(seen=inputs[0]))
    model(tokens, state)
    logits_BTH = x["seen"] @ span.direction_HD.T + span.bias_H
    slope_BTH = 10 * logits_BTH.sigmoid() * (1 - logits_BTH.sigmoid())
    torch.testing.assert_close(gradients[0] - gradients[1], 0.01 * slope_BTH.mean((0, 1)) / 3)
    with added_penalties() as added:
        model.eval()(tokens, state)
    assert not added


def test_a_penalty_that_is_not_collected_is_dropped():
    add_penalty(torch.ones(()))
    with added_penalties() as outer:
        with added_penalties() as inner:
            add_penalty(torch.ones(()))
        add_penalty(torch.zeros(()))
    assert [float(value) for value in inner] == [1.0]
    assert [float(value) for value in outer] == [0.0]


def recall_blocks(steps: int, batch: int = 16, length: int = 24):
    """Random digits; after a question mark comes the digit of 12 tokens before it."""
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(8, (batch, steps * length + 1), generator=draw)
    for place in range(14, tokens.shape[1], 5):
        tokens[:, place - 1] = 8
        tokens[:, place] = tokens[:, place - 13]
        tokens[:, place].clamp_(max=7)
    for step in range(steps):
        part = tokens[:, step * length : (step + 1) * length + 1]
        yield part[:, :-1], part[:, 1:]


def trained(steps: int, **span: float) -> tuple[LanguageModel, list[float]]:
    config = AdaptiveSpanConfig(
        num_layers=1,
        width=32,
        num_heads=1,
        inner_width=32,
        dropout=0.0,
        span=SpanConfig(kind="dynamic", limit=24, ramp=4, start=0.8, **span),
    )
    torch.manual_seed(0)
    model = build(config, 9).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    updater, state, losses = Updater(model), model.initial_state(16), []
    for tokens, targets in recall_blocks(steps):
        nats, state = updater.update(tokens, targets, state, [optimizer])
        losses.append(float(nats) / targets.numel())
    return model.eval(), losses


def test_spans_are_learned_where_they_are_needed():
    """Long after a question mark and short elsewhere; without the question's answer the loss is above 1.6."""
    model, losses = trained(600, penalty=0.002, penalty_from=250)
    (span,) = spans_of(model)
    seen = {}
    span.register_forward_hook(lambda _, __, spans_BHT: seen.update(spans=spans_BHT))
    tokens, _ = next(iter(recall_blocks(1)))
    with torch.no_grad():
        model(tokens, model.initial_state(16))
    spans_BT = seen["spans"][:, 0]
    assert losses[0] > 2
    assert sum(losses[-20:]) / 20 < 1.4
    assert spans_BT[tokens == 8].mean() > 12
    assert spans_BT[tokens != 8].mean() < 8


def test_a_penalty_gives_shorter_spans():
    means = []
    for penalty in (0.0, 0.05):
        (span,) = spans_of(trained(40, penalty=penalty)[0])
        means.append(span.diagnostics_of([span])["span_mean"])
    assert means[1] < 0.8 * means[0]
