"""Rows of a batch that are replaced while the others go on."""

from __future__ import annotations

import pytest
import torch

from longspan.generation import sample
from longspan.kernels import linear, span_attention
from longspan.kernels.span_attention import decode_cpu, decode_gpu, gpu
from longspan.models import LanguageModel, Stack
from longspan.serving.request import Sampling
from longspan.serving.row_decoder import RowDecoder
from longspan.serving.sampling import Draws, draw
from longspan.serving.slots import (
    BatchedSlots,
    SeparateSlots,
    alike_sizes,
    begun,
    has_fixed_shapes,
    make_slots,
)
from longspan.state import State
from tests.models.test_contract import NAMES, VOCABULARY, make
from tests.models.test_decoder import CARRIED, only_interpreted
from tests.using.test_every_model import lively

FIXED = [name for name in NAMES if not name.startswith("gpt")]


def text_state(model: LanguageModel, seed: int, length: int) -> State:
    tokens_BT = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model(tokens_BT, model.initial_state(1))[1]


@pytest.mark.parametrize("variant", FIXED)
def test_a_row_goes_on_with_the_text_that_was_put_there(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_cpu, "SPARE_ROWS", 3)  # buffers move now and then
    model = make(variant)
    decoder = RowDecoder(model, begun(model, 3))
    tokens_TB1 = torch.randint(VOCABULARY, (8, 3, 1))
    states = {row: text_state(model, row, 4 + 5 * row) for row in (1, 2)}
    carried: dict[int, State] = {}
    for time, tokens_B1 in enumerate(tokens_TB1):
        for row in (1, 2):
            if time == 2 * row:
                decoder.put(row, decoder.begin(states[row]))
                carried[row] = states[row]
        found_BV = decoder.read(tokens_B1)
        for row, before in carried.items():
            with torch.no_grad():
                expected_BTV, carried[row] = model.log_probs(tokens_B1[row : row + 1], before)
            torch.testing.assert_close(found_BV[row], expected_BTV[0, 0], rtol=1e-8, atol=1e-9)
    assert carried.keys() == {1, 2}


@only_interpreted
@pytest.mark.parametrize("variant", ["modern, n-grams", "all-attention, dynamic"])
def test_a_ring_of_a_gpu_goes_on_with_another_text(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not variant.startswith(CARRIED)
    model = lively(variant).float()
    model.refresh()
    state = text_state(model, 1, 9)
    tokens_TB1 = torch.randint(VOCABULARY, (5, 2, 1))
    carried, expected = state, []
    for tokens_B1 in tokens_TB1[2:]:
        with torch.no_grad():
            log_probs_BTV, carried = model.log_probs(tokens_B1[1:], carried)
        expected.append(log_probs_BTV[0, 0])
    monkeypatch.setattr(decode_gpu, "PART", 16)
    monkeypatch.setattr(span_attention, "_gpu_backend", lambda *_: gpu)
    monkeypatch.setattr(linear, "use_triton", lambda _: True)
    decoder = RowDecoder(model, begun(model, 2))
    for tokens_B1 in tokens_TB1[:2]:
        decoder.read(tokens_B1)
    decoder.put(1, decoder.begin(state))
    for tokens_B1, expected_V in zip(tokens_TB1[2:], expected, strict=True):
        torch.testing.assert_close(decoder.read(tokens_B1)[1], expected_V, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("variant", ["modern, n-grams", "adaptive-span", "sha-rnn", "transformer-xl"])
def test_a_text_has_the_same_bits_whatever_the_others_are(variant: str) -> None:
    model = lively(variant).float()
    model.refresh()
    state, tokens = text_state(model, 1, 9), torch.randint(VOCABULARY, (30,)).tolist()
    alone = make_slots(model, 32)
    key = alone.add(state)
    expected = [alone.read({key: token}) for token in tokens]
    numbers, slots = torch.Generator().manual_seed(3), make_slots(model, 32)
    others = [slots.add(text_state(model, seed, 3 + seed)) for seed in range(20)]
    key = slots.add(state)
    for time, token in enumerate(tokens):
        for _ in range(int(torch.randint(4, (), generator=numbers))):
            slots.remove(others.pop(0)) if others else None
        if time == 5:
            others += [slots.add(text_state(model, seed, 2)) for seed in range(11 - len(others))]
        drawn = torch.randint(VOCABULARY, (len(others),), generator=numbers).tolist()
        found_NV = slots.read({**dict(zip(others, drawn, strict=True)), key: token})
        assert torch.equal(found_NV[-1:], expected[time])
    assert isinstance(slots, BatchedSlots)
    assert not others
    assert slots.rows < 32  # it moved to a smaller batch


def test_a_size_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively("modern").float()
    model.refresh()
    assert alike_sizes(model, [8, 16])[-1] == 16
    read = RowDecoder.read
    monkeypatch.setattr(RowDecoder, "read", lambda self, t: read(self, t) * (1 + 1e-6 * (len(t) == 8)))
    assert alike_sizes(model, [8, 16]) == [16]
    monkeypatch.setattr(RowDecoder, "read", lambda self, t: read(self, t) + torch.arange(len(t))[:, None])
    assert alike_sizes(model, [8, 16]) == []
    assert isinstance(make_slots(model, 16), SeparateSlots)


def test_a_state_that_grows_is_continued_on_its_own() -> None:
    model = lively("gpt").float()
    model.refresh()
    assert not has_fixed_shapes(model)
    slots, states = make_slots(model, 4), [text_state(model, length, length) for length in (2, 13)]
    keys = [slots.add(state) for state in states]
    found_NV = slots.read(dict(zip(keys, (3, 4), strict=True)))
    for row, state in enumerate(states):
        with torch.no_grad():
            expected_BTV, _ = model.log_probs(torch.tensor([[3 + row]]), state)
        torch.testing.assert_close(found_NV[row], expected_BTV[0, 0])


def test_every_row_draws_as_it_would_alone() -> None:
    numbers = torch.Generator().manual_seed(0)
    settings = [
        Sampling(temperature=t, top_k=k, top_p=p, repetition_penalty=r)
        for t in (0.0, 1e-30, 0.7, 1.0, 3.0)
        for k in (None, 1, 5, 400)
        for p in (None, 1e-9, 0.5, 1.0)
        for r in (1.0, 1.3)
    ]
    texts = [Draws(one, torch.Generator().manual_seed(n)) for n, one in enumerate(settings)]
    alone = [torch.Generator().manual_seed(n) for n in range(len(settings))]
    generated: list[set[int]] = [set() for _ in settings]
    for _ in range(4):
        log_probs_NV = torch.randn(len(settings), 300, generator=numbers).mul(3).log_softmax(-1)
        found = draw(log_probs_NV, texts)
        for n, one in enumerate(settings):
            scores_1V = log_probs_NV[n : n + 1].clone()
            scores_1V[:, sorted(generated[n])] *= one.repetition_penalty
            expected = int(sample(scores_1V, one.temperature, one.top_k, one.top_p, alone[n]))
            assert found[n] == expected, one
            generated[n].add(expected)


@pytest.mark.parametrize("step", [None, lambda tokens_1B: pytest.fail("its rows cannot be replaced")])
def test_a_model_without_such_a_step_is_read_by_forward(
    step: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stack, "step_from", lambda *_: step)
    model = make("modern, n-grams")
    slots, states = make_slots(model, 8), [text_state(model, length, length) for length in (2, 13, 5)]
    assert isinstance(slots, BatchedSlots)
    keys = [slots.add(state) for state in states]
    for _ in range(2):
        found_NV = slots.read(dict(zip(keys, (3, 4, 5), strict=True)))
    for row, state in enumerate(states):
        with torch.no_grad():
            expected_BTV, _ = model.log_probs(torch.tensor([[3 + row] * 2]), state)
        torch.testing.assert_close(found_NV[row], expected_BTV[0, 1], rtol=1e-8, atol=1e-9)
