"""The context curve: every token sees what it may see, all contexts score the same tokens."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from longspan.config import EvaluationConfig
from longspan.data import token_array
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.errors import UserError
from longspan.evaluation import ContextCurve, context_curve, evaluate
from longspan.evaluation.context_curve import _Rows, ends_of_lanes, runs
from longspan.models import LanguageModel
from longspan.state import State
from tests.using.tiny import tiny_model

TEXT = np.random.default_rng(0).integers(32, 64, 700)


class Counts(LanguageModel):
    """Knows a token if it has seen `needed` tokens before it; else the token costs one nat."""

    def __init__(self, needed: int) -> None:
        super().__init__()
        self.vocabulary_size = 256
        self.weight = nn.Parameter(torch.zeros(1))
        self.head: Any = SimpleNamespace(nll=lambda hidden, targets: (hidden[..., 0] < needed).float())

    def initial_state(self, batch_size: int) -> State:
        return State({"count": torch.zeros(batch_size, dtype=torch.long)})

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        before_BT = state.tensor("count")[:, None] + torch.arange(1, tokens_BT.shape[1] + 1)
        return before_BT[..., None].float(), State({"count": before_BT[:, -1]})


def curve(model: LanguageModel, tokens: np.ndarray = TEXT, **options: Any) -> ContextCurve:
    given = {"batch_size": 3, "block_length": 8, "contexts": (4, 16, 64), "scored_tokens": 90} | options
    tokenizer = ByteTokenizer()
    return context_curve(model, token_array(tokens, tokenizer), tokenizer=tokenizer, device="cpu", **given)


@pytest.mark.parametrize("needed", [4, 5, 16, 17, 19, 20, 64, 65])
def test_a_model_that_needs_k_tokens_knows_from_context_k_on(needed: int) -> None:
    found = curve(Counts(needed))
    assert [point.context for point in found.points] == [4, 16, 64, None]
    assert found.tokens == found.bytes == 90
    for point in found.points[:-1]:
        assert point.context is not None
        stride = point.context // 4
        assert (point.least, point.most) == (point.context, point.context + stride - 1)
        # the tokens of a run see C, C + 1, ... tokens; 30 scored tokens of each lane
        pasts = [point.context + position % stride for position in range(30)] * 3
        assert point.nats == sum(past < needed for past in pasts)
    assert found.points[-1].nats == 0
    assert found.points[-1].least >= 64


@settings(max_examples=60, deadline=None)
@given(st.integers(70, 900), st.integers(1, 9), st.integers(1, 33), st.integers(1, 400), st.integers(1, 40))
def test_all_contexts_score_the_same_tokens(
    num_tokens: int, batch_size: int, context: int, scored: int, block_length: int
) -> None:
    plan = ends_of_lanes(num_tokens, batch_size, context, scored)
    targets = [
        n for lane in plan.lanes for n in range(lane.start + 1 + lane.warm, lane.start + 1 + lane.length)
    ]
    assert len(targets) == len({*targets}) == plan.tokens <= scored
    assert all(lane.warm + 1 >= context for lane in plan.lanes)
    for shorter in {1, max(1, context // 3), context}:
        parts = list(runs(plan, shorter, _Rows(batch_size * block_length, block_length, batch_size, 1 << 20)))
        lanes = [lane for part in parts for lane in part.lanes]
        found = [n for lane in lanes for n in range(lane.start + 1 + lane.warm, lane.start + 1 + lane.length)]
        assert found == targets
        assert all(lane.start >= 0 and lane.warm == shorter - 1 for lane in lanes)
        assert all(lane.length < shorter * 1.25 or lane.length == shorter for lane in lanes)
        assert sum(part.tokens for part in parts) == plan.tokens


def nats_of(model: LanguageModel, tokens: np.ndarray, scored: int) -> float:
    """Of the last tokens, read in one piece from an empty state."""
    text = torch.from_numpy(tokens)[None]
    with torch.no_grad():
        log_probs_BTV, _ = model.log_probs(text[:, :-1], model.initial_state(1))
    return -float(log_probs_BTV[0].double().gather(1, text[0, 1:, None])[-scored:].sum())


def test_a_real_model_against_the_plainest_loop() -> None:
    model = tiny_model()
    found = curve(model)
    lanes = [(0, 233), (233, 466), (466, 699)]
    for point in found.points:
        expected = 0.0
        for start, end in lanes:
            first, stride = end - 29, (point.context or 0) // 4 or 30
            for run in range(first, end + 1, stride):
                last = min(run + stride, end + 1)
                begin = start if point.context is None else run - point.context
                expected += nats_of(model, TEXT[begin:last], last - run)
        assert point.nats == pytest.approx(expected, rel=1e-6)
    assert len({round(point.nats, 2) for point in found.points}) > 2  # the past matters


@pytest.mark.parametrize("batch_size", [1, 3])
def test_all_of_the_past_is_the_plain_evaluation(batch_size: int) -> None:
    model, tokenizer = tiny_model(), ByteTokenizer()
    plain = evaluate(
        model,
        token_array(TEXT, tokenizer),
        tokenizer=tokenizer,
        config=EvaluationConfig(batch_size=batch_size),
        block_length=8,
        device="cpu",
    )
    found = curve(model, contexts=(1,), scored_tokens=10**6, batch_size=batch_size)
    assert found.points[-1].nats == plain.nats
    assert (found.tokens, found.bytes, found.unknown) == (plain.tokens, plain.bytes, plain.unknown)
    assert found.bits_per_byte(found.points[-1]) == plain.bits_per_byte
    limited = curve(model, contexts=(), scored_tokens=10**6, batch_size=batch_size, max_tokens=51)
    assert limited.tokens == 51


def test_contexts_that_are_too_long_are_left_out() -> None:
    found = curve(Counts(1), contexts=(4096, 349, 350, 349))
    assert [point.context for point in found.points] == [349, None]
    assert found.left_out == (350, 4096)
    assert found.lanes == 1
    with pytest.raises(UserError, match="context of 350 needs 700 tokens that can be scored, not 699: give"):
        curve(Counts(1), contexts=(350,))


def test_progress_and_figures() -> None:
    told: list[tuple[int, int]] = []
    found = curve(Counts(5), progress=lambda *numbers: told.append(numbers))
    assert told[-1][0] == told[-1][1] == {total for _, total in told}.pop()
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    figures = found.figures()
    assert figures["context_curve"][-1]["context"] is None
    assert figures["context_curve"][0]["bits_per_byte"] == found.points[0].nats / math.log(2) / 90
    assert figures["left_out"] == []


def test_rows_are_limited_by_the_size_of_their_states() -> None:
    assert _Rows(tokens=4096, block_length=512, lanes=8, state_bytes=4).of(16) == 256
    assert _Rows(tokens=4096, block_length=512, lanes=8, state_bytes=4).of(9000) == 8
    assert _Rows(tokens=4096, block_length=512, lanes=8, state_bytes=1 << 27).of(16) == 8
    assert _Rows(tokens=4, block_length=512, lanes=8, state_bytes=4).of(16) == 1


class InContexts(Counts):
    """Begins anew after every 20 tokens."""

    context = 20

    def forward(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        before_BT = state.tensor("count")[:, None] + torch.arange(tokens_BT.shape[1])
        return (before_BT % 20 + 1)[..., None].float(), State({"count": before_BT[:, -1] + 1})


def test_contexts_that_the_model_cannot_hold_are_left_out() -> None:
    """A run of context 16 ends after 19 tokens, one of 17 after 20, and one of 20 after 24."""
    found = curve(InContexts(16), contexts=(16, 17, 20, 64))
    assert [(point.context, point.nats) for point in found.points[:-1]] == [(16, 0), (17, 0)]
    assert (found.left_out, found.model_context) == ((20, 64), 20)
    last = found.points[-1]
    assert (last.least, last.most) == (1, 20)
    assert last.nats == 3 * sum((place - 1) % 20 + 1 < 16 for place in range(204, 234))
    with pytest.raises(UserError, match="a new context every 20 tokens, and a context of 18 needs 21"):
        curve(InContexts(1), contexts=(18, 64))


def test_the_scored_tokens_do_not_depend_on_the_model() -> None:
    """Contexts that only one model can hold decide the lanes of both."""
    streams, contexts = (curve(model, TEXT[:300]) for model in (Counts(1), InContexts(1)))
    assert (streams.left_out, contexts.left_out) == ((), (64,))
    assert (streams.lanes, contexts.lanes) == (2, 2)
    assert streams.tokens == contexts.tokens


@pytest.mark.parametrize(("scored", "most"), [(7, 17), (90, 19)])
def test_what_is_seen_where_few_tokens_are_scored(scored: int, most: int) -> None:
    """Lanes of two tokens in the first case; a run of context 16 has four."""
    found = curve(Counts(1), contexts=(16,), scored_tokens=scored)
    assert (found.points[0].least, found.points[0].most) == (16, most)
    found = curve(InContexts(1), contexts=(16,), scored_tokens=scored)
    lasts = [(699 * (lane + 1) // 3 - 699 * lane // 3) for lane in range(3)]
    places = [place for last in lasts for place in range(last - scored // 3, last)]
    seen = [place % 20 + 1 for place in places]
    assert (found.points[-1].least, found.points[-1].most) == (min(seen), max(seen))


def test_what_was_not_read_is_said() -> None:
    found = curve(Counts(1), max_tokens=299)
    assert (found.read, found.beyond) == (300, 400)
    assert (found.figures()["read"], found.figures()["beyond"]) == (300, 400)
