"""Paths that agree pass; a path that is broken anywhere does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.bench.agreement import Agreement, _furthest, check_agreement
from longspan.bench.bench_paths import paths_for
from longspan.bench.spans import set_spans
from longspan.bench.training import Training
from longspan.config import (
    AdaptiveSpanConfig,
    RunConfig,
    ShaRnnConfig,
    SpanConfig,
    StageConfig,
    TrainingConfig,
)
from longspan.errors import UserError
from longspan.kernels.dispatch import forced_path
from longspan.layers import attention
from longspan.models import LanguageModel, build

CPU = torch.device("cpu")
CONFIG = AdaptiveSpanConfig(
    num_layers=2, width=32, num_heads=2, inner_width=32, dropout=0.3, span=SpanConfig(limit=64, ramp=4)
)


def model() -> LanguageModel:
    made = build(CONFIG, 11)
    set_spans(made, [[3, 50], [20, 6]])
    return made


def check(precision: str = "float32") -> Agreement:
    made = model()
    return check_agreement(made, *paths_for(made, CPU), precision=precision, block_length=16, name="mine")


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_paths_agree(precision):
    found = check(precision)
    assert 0 < found.error <= found.allowed


def broken(change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path only."""
    whole = attention.span_attention
    monkeypatch.setattr(
        attention,
        "span_attention",
        lambda *args: whole(*args) if forced_path() == "eager" else change(whole(*args)),
    )


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_wrong_outputs_are_found(precision, monkeypatch):
    broken(lambda out: 1.3 * out, monkeypatch)
    with pytest.raises(UserError, match="mine: the fast path disagrees with the reference path"):
        check(precision)


def test_wrong_gradients_are_found(monkeypatch):
    broken(lambda out: out.detach() + 0.9 * (out - out.detach()), monkeypatch)
    with pytest.raises(UserError, match=r"the gradient of .* has a relative error of"):
        check()


def test_what_is_not_a_number_is_found(monkeypatch):
    broken(lambda out: out * torch.nan, monkeypatch)
    with pytest.raises(UserError, match="disagrees"):
        check()


def test_the_measure():
    exact = {"a": torch.tensor([3.0, 4.0]).double(), "b": torch.tensor([10.0]).double()}
    reference = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([10.0])}
    fast = {"a": torch.tensor([3.0, 4.75]), "b": torch.tensor([10.2])}
    # a is off by 0.15 where three times 0.1 is allowed, b by 0.02 where 0.01 is
    found = _furthest(exact, reference, fast, tolerance=0.01)
    assert (found.tensor, found.allowed) == ("b", 0.01)
    assert found.error == pytest.approx(0.02, rel=1e-4)
    found = _furthest(exact, reference, fast, tolerance=0.1)
    assert (found.tensor, found.error, found.allowed) == ("a", pytest.approx(0.15), pytest.approx(0.3))


def test_where_the_paths_are_one_there_is_one():
    lonely = build(ShaRnnConfig(num_layers=2, width=8, inner_width=16), 11)
    assert [path.name for path in paths_for(lonely, CPU)] == ["fast"]
    assert [path.name for path in paths_for(lonely, torch.device("cuda"))] == ["reference", "fast"]


def test_steps_move_nothing_and_carry_the_state():
    config = RunConfig(
        model=CONFIG,
        training=TrainingConfig(batch_size=2, block_length=16, precision="float32", compile=False),
        stage=(StageConfig(steps=1, learning_rate=1.0, optimizer="adagrad", clip_norm=0.03),),
    )
    made = model()
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    reference, fast = paths_for(made, CPU)
    made.eval()
    losses = {}
    for path in (reference, fast):
        training = Training(made, config, path)
        losses[path.name] = torch.stack([training.step() for _ in range(2)])
        assert training.state.flatten()["blocks.0.memory"].any()
    torch.testing.assert_close(losses["reference"], losses["fast"])
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize(("segment_length", "carried"), [(None, True), (32, True), (16, False)])
def test_a_segment_of_one_block_begins_with_an_empty_state(
    segment_length: int | None, carried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = TrainingConfig(
        batch_size=2, block_length=16, segment_length=segment_length, precision="float32"
    )
    config = RunConfig(model=CONFIG, training=training, stage=(StageConfig(steps=1, learning_rate=1.0),))
    made = model()
    steps, given = Training(made, config, paths_for(made, CPU)[-1]), []
    update = steps.updater.update

    def seen(tokens_BT: Tensor, targets_BT: Tensor, state: Any, *rest: Any) -> Any:
        given.append(bool(state.flatten()["blocks.0.memory"].any()))
        return update(tokens_BT, targets_BT, state, *rest)

    monkeypatch.setattr(steps.updater, "update", seen)
    for _ in range(2):
        steps.step()
    assert given == [False, carried]
