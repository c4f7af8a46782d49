"""Updates over several blocks, and clipping by value."""

from __future__ import annotations

import signal

import pytest
import torch

from longspan.config import StageConfig, TrainingConfig
from longspan.data import Lanes
from longspan.training import Interrupted, resume, train
from longspan.training.step import Updater

from .runs import Signals, metrics, outcome, small_config
from .tiny import TinyModel


def lanes() -> Lanes:
    ids = [(7 * i + i * i) % 11 for i in range(5 * 30)]
    return Lanes(torch.tensor(ids).numpy(), 5, 4)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("begins", [False, True])
def test_losses_add_up_and_gradients_flow_through_the_state(micro_batches, begins):
    torch.manual_seed(0)
    model, source = TinyModel().double(), lanes()
    first = source.next(Lanes.start)
    second = source.next(first.position)
    object.__setattr__(second, "begins", begins)
    updater = Updater(model, micro_batches=micro_batches)
    nats, state = updater.gradients(first.tokens_BT, first.targets_BT, model.initial_state(5), [second])
    found = {name: p.grad.clone() for name, p in model.named_parameters()}

    model.zero_grad()
    hidden, carried = model(first.tokens_BT, model.initial_state(5))
    one = model.head.nll(hidden, first.targets_BT)
    hidden, carried = model(second.tokens_BT, model.initial_state(5) if begins else carried)
    two = model.head.nll(hidden, second.targets_BT)
    (one.mean() + two.mean() + 2 * sum(model.penalties().values())).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-12, atol=1e-14, msg=name)
    torch.testing.assert_close(nats.double(), (one.sum() + two.sum()).detach().double(), rtol=1e-6, atol=0)
    # Products of fewer rows may have other bits: it depends on the CPU.
    hidden = state.tensor("hidden")
    torch.testing.assert_close(hidden, carried.tensor("hidden").detach(), rtol=1e-12, atol=1e-14)
    assert not hidden.requires_grad

    model.zero_grad()
    # Gradients that stop between the blocks are others.
    _, detached = updater.gradients(first.tokens_BT, first.targets_BT, model.initial_state(5))
    updater.gradients(second.tokens_BT, second.targets_BT, model.initial_state(5) if begins else detached)
    same = torch.allclose(found["keep.weight"], model.keep.weight.grad, rtol=1e-9)
    assert same == begins


def test_a_run_counts_tokens_of_all_blocks_and_resumes_exactly(text, uninterrupted, tmp_path):
    """Also where an update would cross the end of an epoch."""
    config = small_config(text, training__accumulate=3)
    whole = train(config, tmp_path / "whole").path
    tokens, of_one = (
        [line["tokens"] for line in metrics(run) if line["kind"] == "train"][-1]
        for run in (whole, uninterrupted)
    )
    assert 2.5 * of_one < tokens < 3.5 * of_one
    with pytest.raises(Interrupted):
        train(config, tmp_path / "stopped", reporter=Signals("step 23 ", signal.SIGTERM))
    assert outcome(resume(tmp_path / "stopped").path) == outcome(whole)


def test_an_update_needs_a_block():
    with pytest.raises(ValueError, match="accumulate must be at least 1"):
        TrainingConfig(accumulate=0)


@pytest.mark.parametrize("clip_norm", [0.0, 0.02])
def test_values_are_clipped_before_the_norm(clip_norm):
    torch.manual_seed(0)
    model, block = TinyModel(), lanes().next(Lanes.start)
    updater, state = Updater(model), model.initial_state(5)
    updater.gradients(block.tokens_BT, block.targets_BT, state)
    expected = {name: p.grad.clamp(-0.01, 0.01) for name, p in model.named_parameters()}
    assert any(p.grad.abs().max() > 0.01 for p in model.parameters())
    if clip_norm:
        norm = torch.cat([g.flatten() for g in expected.values()]).norm()
        assert norm > clip_norm
        expected = {name: g * clip_norm / (norm + 1e-6) for name, g in expected.items()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    model.after_update = lambda: None
    updater.update(block.tokens_BT, block.targets_BT, state, [sgd], clip_norm, clip_value=0.01)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] - expected[name])


def test_a_stage_clips_values(text, tmp_path):
    losses = []
    for value in (0.0, 1e-4):
        settings = {"stage__0__clip_value": value, "stage__0__optimizer": "sgd", "stage__0__clip_norm": 0}
        config = small_config(text, stage__0__steps=12, stage__1__steps=1, **settings)
        run = train(config, tmp_path / str(value)).path
        losses.append(metrics(run)[0]["loss"])
    assert losses[1] > losses[0] + 1e-3
    with pytest.raises(ValueError, match="clip_value must not be negative"):
        StageConfig(steps=1, learning_rate=0.1, clip_value=-1.0)


def test_adagrad_accepts_a_momentum_of_zero_only():
    assert StageConfig(steps=1, learning_rate=0.1, optimizer="adagrad", momentum=0.0).momentum == 0.0
    with pytest.raises(ValueError, match="momentum has no effect with optimizer adagrad"):
        StageConfig(steps=1, learning_rate=0.1, optimizer="adagrad", momentum=0.9)
