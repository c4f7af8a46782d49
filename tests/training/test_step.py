"""One update: pieces of a batch, precisions, penalties and the carried state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.config import AdaptiveSpanConfig, SpanConfig, StageConfig
from longspan.models import LanguageModel, build
from longspan.optim import build_optimizers
from longspan.state import State
from longspan.training.step import Updater

from .tiny import TinyModel


def adaptive_span() -> LanguageModel:
    span = SpanConfig(limit=16, ramp=4, start=0.3, penalty=0.01)
    return build(AdaptiveSpanConfig(num_layers=2, width=16, num_heads=2, inner_width=32, span=span), 11)


def blocks(number: int, batch_size: int = 5) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    texts = [torch.randint(11, (batch_size, 9), generator=draw) for _ in range(number)]
    return [(text[:, :-1], text[:, 1:]) for text in texts]


def walk(model: LanguageModel, micro_batches: int) -> tuple[list[float], dict[str, Tensor], State]:
    """Read three blocks with carried state, adding up gradients."""
    updater = Updater(model, micro_batches=micro_batches)
    state, nats = model.initial_state(5), []
    for tokens_BT, targets_BT in blocks(3):
        total, state = updater.gradients(tokens_BT, targets_BT, state)
        nats.append(float(total))
    return nats, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, state


@pytest.mark.parametrize("make", [TinyModel, adaptive_span])
@pytest.mark.parametrize("micro_batches", [2, 5])
def test_micro_batches_change_nothing_but_memory(make: Any, micro_batches: int) -> None:
    model = make()
    whole_nats, whole, whole_state = walk(model, 1)
    model.zero_grad()
    nats, gradients, state = walk(model, micro_batches)
    assert nats == pytest.approx(whole_nats, rel=1e-6)
    assert gradients.keys() == whole.keys() == dict(model.named_parameters()).keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=2e-5, atol=2e-7, msg=name)
    for name, leaf in whole_state.flatten().items():
        torch.testing.assert_close(state.flatten()[name], leaf)


def test_gradients_are_those_of_mean_loss_and_penalty() -> None:
    model = TinyModel()
    ((tokens_BT, targets_BT),) = blocks(1)
    hidden_BTD, _ = model(tokens_BT, model.initial_state(5))
    loss = model.head.nll(hidden_BTD, targets_BT).mean() + 0.1 * model.span_LH.sum()
    expected = torch.autograd.grad(loss, list(model.parameters()))
    nats, state = Updater(model).gradients(tokens_BT, targets_BT, model.initial_state(5))
    for (name, parameter), gradient in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, msg=name)
    assert float(nats) / targets_BT.numel() == pytest.approx(float(loss.detach()) - 0.1)
    assert not any(leaf.requires_grad for leaf in state.flatten().values())


def test_an_update_clips_moves_and_calls_the_hook() -> None:
    model = TinyModel()
    (sgd,) = build_optimizers(model, StageConfig(steps=1, learning_rate=1.0, optimizer="sgd"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ((tokens_BT, targets_BT),) = blocks(1)
    Updater(model).update(tokens_BT, targets_BT, model.initial_state(5), [sgd], clip_norm=0.01)
    moved = torch.stack([(p.detach() - before[n]).norm() for n, p in model.named_parameters()]).norm()
    assert float(moved) == pytest.approx(0.01, rel=1e-3)
    assert model.updates == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precisions_learn_and_keep_float32_weights(precision: Any) -> None:
    model = adaptive_span()
    (adamw,) = build_optimizers(model, StageConfig(steps=9, learning_rate=0.01))
    updater = Updater(model, precision=precision)
    ((tokens_BT, targets_BT),) = blocks(1)
    losses = []
    for _ in range(12):
        nats, _ = updater.update(tokens_BT, targets_BT, model.initial_state(5), [adamw], clip_norm=1.0)
        losses.append(float(nats))
    assert losses[-1] < 0.8 * losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert updater.scaler.is_enabled() == (precision == "fp16")


def test_a_step_whose_scaled_gradients_overflow_is_left_out() -> None:
    model = TinyModel()
    (sgd,) = build_optimizers(model, StageConfig(steps=1, learning_rate=0.1, optimizer="sgd"))
    updater = Updater(model, precision="fp16")
    updater.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ((tokens_BT, targets_BT),) = blocks(1)
    updater.update(tokens_BT, targets_BT, model.initial_state(5), [sgd])
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert updater.scaler.get_scale() == 2.0**119
