"""`LearnedSpan` in a plain module and a plain loop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from longspan.errors import UserError
from longspan.nn import LearnedSpan

from .plain import round_trips


def set_to(span: LearnedSpan, *fractions: float) -> LearnedSpan:
    with torch.no_grad():
        span.fraction_H.copy_(torch.tensor(fractions))
    return span


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_spans_penalty_and_their_gradients(dtype: torch.dtype) -> None:
    span = set_to(LearnedSpan(3, 200, ramp=8, penalty=0.01), 0.25, 0.5, 0.75).to(dtype)
    assert span().tolist() == [50, 100, 150]
    assert span().dtype == dtype
    penalty = span.penalty()
    assert penalty.item() == pytest.approx(0.01 * 100)
    penalty.backward()
    assert span.fraction_H.grad is not None
    assert span.fraction_H.grad.tolist() == pytest.approx([0.01 * 200 / 3] * 3)


def test_start_and_one_span_of_the_layer() -> None:
    span = LearnedSpan(4, 64, start=0.5, per="layer")
    assert span().tolist() == [32] * 4
    assert span.fraction_H.shape == (1,)


def test_clamp_puts_spans_back_and_updates_windows() -> None:
    span = LearnedSpan(2, 500, ramp=10)
    before = span.windows
    set_to(span, -0.3, 1.7)
    assert span.windows == before  # windows follow only after `clamp_`
    span.clamp_()
    assert span().tolist() == [0, 500]
    assert span.windows[0] == before[0]
    assert span.windows[1] == span.memory_length == 500
    assert all(window >= 0 + 10 + 1 for window in span.windows)


def test_a_penalty_ramps_in_with_the_updates() -> None:
    span = LearnedSpan(1, 100, start=0.5, penalty=0.1, penalty_from=1, penalty_full=3)
    found = []
    for _ in range(5):
        found.append(span.penalty().item())
        span.clamp_()
    assert found == pytest.approx([0, 5 / 3, 10 / 3, 5, 5])
    restored = LearnedSpan(1, 100, start=0.5, penalty=0.1, penalty_from=1, penalty_full=3)
    restored.load_state_dict(span.state_dict())
    assert restored.penalty().item() == pytest.approx(5)


def test_loading_and_copying_bring_the_windows_along() -> None:
    span = set_to(LearnedSpan(2, 500, ramp=10), 0.1, 0.8)
    span.clamp_()
    other = nn.ModuleList([LearnedSpan(2, 500, ramp=10)])
    other.load_state_dict(nn.ModuleList([span]).state_dict())
    round_trips(span, LearnedSpan(2, 500, ramp=10))
    for found in (other[0], copy.deepcopy(span)):
        assert isinstance(found, LearnedSpan)
        assert (found.windows, found.memory_length) == (span.windows, span.memory_length)


def test_a_plain_loop_learns_a_span() -> None:
    span = LearnedSpan(1, 100, penalty=0.001)
    optimizer = torch.optim.SGD(span.parameters(), lr=0.00002)
    for _ in range(200):
        optimizer.zero_grad()
        ((span() - 60).square().sum() + span.penalty()).backward()
        optimizer.step()
        span.clamp_()
    assert span().item() == pytest.approx(60, abs=0.1)
    assert span.windows[0] >= 60 + span.ramp


@pytest.mark.parametrize("wrong", [{"limit": 0}, {"ramp": 0}, {"start": 1.5}, {"num_heads": 0}])
def test_impossible_arguments(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match="must be at least 1, and start between 0 and 1"):
        LearnedSpan(**{"num_heads": 2, "limit": 10} | wrong)  # type: ignore[arg-type]
