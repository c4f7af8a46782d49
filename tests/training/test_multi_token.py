"""Later tokens in the training loss: weights over a stage, gradients, and runs that stop and go on."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.config import AdaptiveSpanConfig, SpanConfig, StageConfig, VocabularyConfig
from longspan.data import Lanes
from longspan.models import LanguageModel, build
from longspan.optim import multi_token_weights
from longspan.output import OutputHead, SoftmaxHead
from longspan.training import Interrupted, resume, train
from longspan.training.step import Updater

from .runs import Signals, metrics, outcome, small_config
from .tiny import TinyModel

WEIGHTS = (0.5, 0.25)


def clusters() -> LanguageModel:
    """A model with an adaptive softmax."""
    span = SpanConfig(limit=16, ramp=4, start=0.3, penalty=0.01)
    vocabulary = VocabularyConfig(cutoffs=(3, 7), division=2)
    config = AdaptiveSpanConfig(
        num_layers=1, width=16, num_heads=2, inner_width=32, span=span, vocabulary=vocabulary
    )
    return build(config, 11)


def stage(**options: Any) -> StageConfig:
    return StageConfig(**{"steps": 100, "learning_rate": 0.1, "multi_token": WEIGHTS} | options)


class TestWeights:
    def test_they_fall_linearly_to_nothing(self) -> None:
        half = stage(multi_token_until=0.5)
        assert multi_token_weights(half, 1) == WEIGHTS
        assert multi_token_weights(half, 26) == pytest.approx((0.25, 0.125))
        assert multi_token_weights(half, 50) == pytest.approx((0.01, 0.005))
        assert multi_token_weights(half, 51) == multi_token_weights(half, 100) == ()

    def test_time_counts_where_it_is_limited(self) -> None:
        timed = stage(steps=10**9, max_seconds=60.0, multi_token_until=1.0)
        assert multi_token_weights(timed, 7, seconds=30.0) == pytest.approx((0.25, 0.125))

    def test_no_weights_are_none(self) -> None:
        assert multi_token_weights(stage(multi_token=()), 1) == ()
        assert multi_token_weights(stage(multi_token=(0.0, 0.0)), 1) == ()

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"multi_token": (0.5, -0.1)}, "weights of multi_token must not be negative"),
            ({"multi_token_until": 0.0}, "multi_token_until must be above 0 and at most 1"),
            ({"multi_token_until": 1.1}, "multi_token_until must be above 0 and at most 1"),
            ({"multi_token": (), "multi_token_until": 0.5}, "has no effect without multi_token"),
        ],
    )
    def test_mistakes(self, options: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            stage(**options)


def text_of(batch_size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(11, (batch_size, length + 1), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1], ids[:, 1:]


def test_the_loss_is_the_sum_over_positions_and_later_tokens() -> None:
    model = TinyModel().double()
    tokens_BT, targets_BT = text_of(3, 6)
    nats, _ = Updater(model).gradients(tokens_BT, targets_BT, model.initial_state(3), multi_token=WEIGHTS)
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    hidden_BTD, _ = model(tokens_BT, model.initial_state(3))
    log_p = model.head.log_probs(hidden_BTD)
    next_nats = -log_p.detach().gather(2, targets_BT[..., None]).sum()
    loss = sum(model.penalties().values())
    for b in range(3):
        for t in range(6):
            for after, weight in enumerate((1.0, *WEIGHTS)):
                if t + after < 6:
                    loss = loss - weight * log_p[b, t, targets_BT[b, t + after]] / 18
    loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, msg=name)
    assert float(nats) == pytest.approx(float(next_nats))  # of the next token alone


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_softmax_that_shares_its_scores_gives_the_same(softcap: float | None) -> None:
    head = SoftmaxHead(6, 11, softcap=softcap)
    hidden_BTD = torch.randn(2, 5, 6, requires_grad=True)
    targets_BT = torch.randint(11, (2, 5))
    shared = head.nll_ahead(hidden_BTD, targets_BT, 4)
    each = OutputHead.nll_ahead(head, hidden_BTD, targets_BT, 4)
    assert [nll.shape for nll in shared] == [(2, 5 - i) for i in range(5)]
    for one, other in zip(shared, each, strict=True):
        torch.testing.assert_close(one, other)
    leaves = [hidden_BTD, *head.parameters()]
    gradients = [
        torch.autograd.grad(sum((i + 1) * nll.sum() for i, nll in enumerate(found)), leaves)
        for found in (shared, each)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [TinyModel, clusters])
@pytest.mark.parametrize("accumulate", [False, True])
def test_micro_batches_have_the_same_gradients(make: Any, accumulate: bool) -> None:
    torch.manual_seed(0)
    model = make().double()
    source = Lanes(torch.tensor([(7 * i + i * i) % 11 for i in range(150)]).numpy(), 5, 4)
    first = source.next(Lanes.start)
    assert first is not None
    second = source.next(first.position)
    assert second is not None
    found = []
    for micro_batches in (1, 2, 5):
        model.zero_grad()
        nats, _ = Updater(model, micro_batches=micro_batches).gradients(
            first.tokens_BT,
            first.targets_BT,
            model.initial_state(5),
            [second] if accumulate else [],
            WEIGHTS,
        )
        found.append(({name: p.grad.clone() for name, p in model.named_parameters()}, float(nats)))
    model.zero_grad()
    without, _ = Updater(model).gradients(
        first.tokens_BT, first.targets_BT, model.initial_state(5), [second] if accumulate else []
    )
    assert [nats for _, nats in found] == pytest.approx([float(without)] * 3, rel=1e-6)
    whole = found[0][0]
    of_head = {f"head.{name}": p.grad for name, p in model.head.named_parameters()}
    assert not any(torch.allclose(whole[name], gradient) for name, gradient in of_head.items())
    for gradients, _ in found[1:]:
        for name, gradient in whole.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-6, atol=1e-9, msg=name)


def test_blocks_may_be_shorter_than_what_is_predicted() -> None:
    model = TinyModel()
    tokens_BT, targets_BT = text_of(2, 1)
    found = []
    for weights in ((), WEIGHTS):
        model.zero_grad()
        Updater(model).gradients(tokens_BT, targets_BT, model.initial_state(2), multi_token=weights)
        found.append(model.keep.weight.grad.clone())
    assert torch.equal(*found)


def test_a_run_goes_on_exactly_and_reports_the_next_token(text: Path, tmp_path: Path) -> None:
    """Stopped while the weights fall, in a stage that has them and that follows one that has none."""
    changes = {
        "stage__0__steps": 10,
        "stage__1__steps": 12,
        "stage__1__multi_token": [3.0, 1.0],
        "stage__1__multi_token_until": 0.75,
    }
    config = small_config(text, **changes)
    whole = train(config, tmp_path / "whole").path
    with pytest.raises(Interrupted):
        train(config, tmp_path / "stopped", reporter=Signals("step 15 ", signal.SIGTERM))
    assert outcome(resume(tmp_path / "stopped").path) == outcome(whole)
    plain = train(small_config(text, stage__0__steps=10, stage__1__steps=12), tmp_path / "plain").path
    with_it, without = (
        [line["loss"] for line in metrics(run) if line["kind"] == "train"] for run in (whole, plain)
    )
    assert with_it[0] == without[0]  # steps 1 to 7
    assert with_it[2] != without[2]  # steps 15 to 21
    assert with_it[2] == pytest.approx(without[2], rel=0.2)  # not 5 times as much
