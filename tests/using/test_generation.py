"""Sampling: the filters to exact values, and carried state against reading everything again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan import generation, reading
from longspan.errors import UserError
from longspan.generation import generate, sample, sampling_distribution
from longspan.models import LanguageModel, Stack
from tests.using.tiny import tiny_model

PROBS = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def distribution(**filters: Any) -> list[float]:
    return [round(p, 5) for p in sampling_distribution(PROBS.log(), **filters)[0].tolist()]


def test_without_filters_the_distribution_is_the_models() -> None:
    assert distribution() == [0.1, 0.4, 0.2, 0.3]


def test_temperature_is_a_power_of_the_probabilities() -> None:
    squares = PROBS[0] ** 2
    assert distribution(temperature=0.5) == [round(float(p), 5) for p in squares / squares.sum()]


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [
        (1, [0, 1, 0, 0]),
        (2, [0, 0.57143, 0, 0.42857]),
        (4, [0.1, 0.4, 0.2, 0.3]),
        (9, [0.1, 0.4, 0.2, 0.3]),
    ],
)
def test_top_k(top_k: int, expected: list[float]) -> None:
    assert distribution(top_k=top_k) == expected


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1e-9, [0, 1, 0, 0]),  # the likeliest always stays
        (0.39, [0, 1, 0, 0]),
        (0.41, [0, 0.57143, 0, 0.42857]),  # 0.4 does not reach it: one more
        (0.69, [0, 0.57143, 0, 0.42857]),
        (0.89, [0, 0.44444, 0.22222, 0.33333]),
        (1.0, [0.1, 0.4, 0.2, 0.3]),
    ],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, expected: list[float]) -> None:
    assert distribution(top_p=top_p) == expected


def test_top_p_counts_what_top_k_has_left() -> None:
    assert distribution(top_k=2, top_p=0.56) == [0, 1, 0, 0]
    assert distribution(top_k=2, top_p=0.58) == [0, 0.57143, 0, 0.42857]


def test_ties_are_cut_to_exactly_k() -> None:
    probs_BV = sampling_distribution(torch.zeros(1, 6), top_k=2)
    assert probs_BV.tolist() == [[0.5, 0.5, 0, 0, 0, 0]]


@given(
    st.lists(st.floats(-30, 0), min_size=1, max_size=9),
    st.floats(1e-3, 50),
    st.none() | st.integers(1, 12),
    st.none() | st.floats(1e-6, 1),
)
@settings(max_examples=80, deadline=None)
def test_what_is_left_is_a_distribution_that_keeps_the_order(
    scores: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    log_probs_BV = torch.tensor([scores]).log_softmax(-1)
    probs = sampling_distribution(log_probs_BV, temperature, top_k, top_p)[0]
    assert float(probs.sum()) == pytest.approx(1, abs=1e-5)
    kept = probs > 0
    assert 1 <= int(kept.sum()) <= (top_k or len(scores))
    if not kept.all():
        assert log_probs_BV[0][kept].min() >= log_probs_BV[0][~kept].max()


def test_almost_no_temperature_does_not_overflow() -> None:
    assert sampling_distribution(PROBS.log(), temperature=1e-42).tolist() == [[0, 1, 0, 0]]
    assert sampling_distribution(PROBS.log(), temperature=1e-300).tolist() == [[0, 1, 0, 0]]


def test_rows_of_a_batch_are_drawn_from_their_own_distributions() -> None:
    log_probs_BV = torch.tensor([[1.0, 0, 0], [0, 0, 1.0], [0, 0.5, 0.5]]).log()
    drawn = torch.stack(
        [sample(log_probs_BV, generator=torch.Generator().manual_seed(n)) for n in range(200)]
    )
    assert (drawn[:, 0] == 0).all()
    assert (drawn[:, 1] == 2).all()
    assert 60 < int((drawn[:, 2] == 1).sum()) < 140
    assert sample(log_probs_BV, temperature=0)[:2].tolist() == [0, 2]


def greedy_from_scratch(model: LanguageModel, prompt: list[int], tokens: int) -> list[int]:
    """Read the whole text again for every token."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            log_probs_BTV, _ = model.log_probs(torch.tensor([text]), model.initial_state(1))
            text.append(int(log_probs_BTV[0, -1].argmax()))
    return text[len(prompt) :]


def test_carried_state_says_what_reading_everything_again_would_say() -> None:
    model = tiny_model(20)
    made = list(generate(model, PROMPT, tokens=40, temperature=0))
    assert made == greedy_from_scratch(model, PROMPT, 40)
    assert len(set(made)) > 1


@pytest.mark.parametrize("block", [1, 3, 8])
def test_a_prompt_longer_than_a_block(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    model = tiny_model(20)
    expected = greedy_from_scratch(model, PROMPT, 12)
    monkeypatch.setattr(reading, "READ_BLOCK", block)
    assert list(generate(model, torch.tensor(PROMPT), tokens=12, temperature=0)) == expected


def test_the_past_is_never_read_again() -> None:
    model, lengths = tiny_model(20), []
    model.embedding.register_forward_hook(lambda module, inputs, output: lengths.append(inputs[0].shape[1]))
    assert len(list(generate(model, PROMPT, tokens=5))) == 5
    assert lengths == [8, 1, 1, 1, 1]


def test_tokens_come_as_they_are_made_and_gradients_stay_on_outside() -> None:
    model, reads = tiny_model(20), []
    model.embedding.register_forward_hook(lambda *_: reads.append(torch.is_grad_enabled()))
    tokens: Iterator[int] = generate(model, PROMPT, tokens=1000)
    next(tokens)
    assert torch.is_grad_enabled()
    next(tokens)
    assert reads == [False, False]


def test_a_seed_decides_the_text() -> None:
    model = tiny_model(20)

    def text(seed: int) -> list[int]:
        return list(generate(model, PROMPT, tokens=30, generator=torch.Generator().manual_seed(seed)))

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_nothing_to_generate() -> None:
    assert list(generate(tiny_model(20), PROMPT, tokens=0)) == []


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"tokens": -1}, "0 or more"),
        ({"temperature": -0.1}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_k": 0}, "top-k must be"),
        ({"top_p": 0.0}, "top-p must be"),
        ({"top_p": 1.5}, "top-p must be"),
    ],
)
def test_settings_that_mean_nothing(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        next(generate(tiny_model(20), PROMPT, **{"tokens": 1, **settings}))


def test_mistakes_of_the_caller() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(tiny_model(20), [], tokens=1))
    with pytest.raises(ValueError, match="evaluation mode"):
        next(generate(tiny_model(20).train(), PROMPT, tokens=1))


@pytest.mark.parametrize("has_step", [True, False])
def test_a_step_is_recorded_once(has_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which steps are launched and which replayed, with a recording that only counts."""

    class Counting:
        made = 0

        def __init__(self, read: Callable[[Tensor], Tensor], _: Tensor) -> None:
            Counting.made += 1
            self.read = read

        def __call__(self, tokens_B1: Tensor) -> Tensor:
            return self.read(tokens_B1)

    model = tiny_model()
    tokens = torch.tensor([[3], [1]])
    plain = generation.Decoder(model, model.initial_state(2))
    expected = [plain.read(tokens) for _ in range(5)]
    monkeypatch.setattr(generation, "_CapturedStep", Counting)
    monkeypatch.setattr(generation, "_on_gpu", lambda _: True)
    if not has_step:
        monkeypatch.setattr(Stack, "step_from", lambda *_: None)
    decoder = generation.Decoder(model, model.initial_state(2))
    found = [decoder.read(tokens) for _ in range(5)]
    assert Counting.made == 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_elsewhere_decoding_goes_through_the_models_own_form_of_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, asked = tiny_model(20), []
    original = model.decoding_state

    def noticed(state: Any) -> Any:
        asked.append(state)
        return original(state)

    monkeypatch.setattr(model, "decoding_state", noticed)
    monkeypatch.setattr(Stack, "step_from", lambda *_: None)
    list(generate(model, PROMPT, tokens=3))
    assert len(asked) == 1


def test_sampling_leaves_its_input_alone() -> None:
    log_probs_BV: Tensor = PROBS.log()
    before = log_probs_BV.clone()
    sampling_distribution(log_probs_BV, 0.7, 2, 0.5)
    assert torch.equal(log_probs_BV, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replayed_steps_are_the_launched_ones_on_cuda() -> None:
    model = tiny_model().cuda()
    tokens_BT = torch.randint(model.vocabulary_size, (2, 40), device="cuda")
    decoder = generation.Decoder(model, model.initial_state(2))
    assert decoder._step is not None
    state = model.decoding_state(model.initial_state(2))
    for tokens_B1 in tokens_BT.split(1, dim=1):
        with torch.no_grad():
            expected_BV, state = generation._read(model, tokens_B1, state)
        torch.testing.assert_close(decoder.read(tokens_B1), expected_BV, rtol=1e-4, atol=1e-4)
    assert decoder._captured is not None
