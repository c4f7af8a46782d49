"""States as bytes: what is damaged, foreign or made up is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.language_model import LoadedModel
from longspan.reading import TextState
from longspan.serving.limits import BadState
from longspan.serving.state_file import Facts, fingerprint, from_bytes, to_bytes
from longspan.state import State
from tests.serving.small_models import KINDS, loaded

LM = loaded("modern, n-grams")
OWN = fingerprint(LM)
STATE = LM.read("abcab\nabc")
FACTS = Facts(OWN, STATE.tokens, STATE.tail, "abc", 1.5)
DATA = to_bytes(STATE, FACTS)


@pytest.mark.parametrize("variant", KINDS)
def test_a_state_survives(variant: str) -> None:
    lm = loaded(variant)
    state, own = lm.read("abcab\nabcabc"), fingerprint(lm)
    facts = Facts(own, state.tokens, state.tail, "é\ud800"[:1], 2.0)
    found, said = from_bytes(to_bytes(state, facts), lm, own)
    assert said == facts
    assert (found.tokens, found.tail) == (state.tokens, state.tail)
    assert list(found.state.flatten()) == list(state.state.flatten())
    assert lm.generate("a", 12, seed=1, state=found) == lm.generate("a", 12, seed=1, state=state)


def test_a_fingerprint_is_that_of_options_and_weights() -> None:
    assert fingerprint(loaded("modern, n-grams")) == OWN
    assert fingerprint(loaded("modern")) != OWN
    other = loaded("modern, n-grams")
    with torch.no_grad():
        next(other.model.parameters()).view(-1)[0] += 1e-6
    assert fingerprint(other) != OWN
    with pytest.raises(BadState, match="comes from another model"):
        from_bytes(DATA, other, fingerprint(other))


def test_every_damaged_byte_is_noticed() -> None:
    for place in [*range(0, len(DATA), 97), *range(12), len(DATA) - 1]:
        damaged = bytearray(DATA)
        damaged[place] ^= 0x10
        with pytest.raises(BadState) as seen:
            from_bytes(bytes(damaged), LM, OWN)
        assert "\n" not in str(seen.value)
    for end in (*range(0, len(DATA), 211), len(DATA) - 1):
        with pytest.raises(BadState):
            from_bytes(DATA[:end], LM, OWN)
    with pytest.raises(BadState):
        from_bytes(DATA + b"0", LM, OWN)


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=200)
    | st.text('[]{}":,0e', max_size=60).map(lambda t: len(t).to_bytes(8, "little") + t.encode())
)
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadState):
        from_bytes(data, LM, OWN)


def test_nesting_and_sizes_that_are_absurd() -> None:
    for header in (b"[" * 100_000, b'{"a":' * 100_000):
        with pytest.raises(BadState):
            from_bytes(len(header).to_bytes(8, "little") + header, LM, OWN)
    with pytest.raises(BadState):
        from_bytes((2**63).to_bytes(8, "little") + b"{}", LM, OWN)


def changed(**leaves: Callable[[Tensor], Tensor]) -> TextState:
    flat = STATE.state.flatten()
    for start, change in leaves.items():
        name = next(name for name in flat if name.replace(".", "_").endswith(start))
        flat[name] = change(flat[name])
    return replace(STATE, state=State.unflatten(flat))


@pytest.mark.parametrize(
    "state",
    [
        changed(memory=lambda leaf: leaf[:, 1:]),
        changed(memory=lambda leaf: leaf.double()),
        changed(memory=lambda leaf: leaf.expand(2, *leaf.shape[1:])),
        changed(before=lambda leaf: leaf - 100),
        changed(before=lambda leaf: leaf + 10**6),
        changed(memory=lambda leaf: leaf / 0),
        replace(STATE, state=State.unflatten(dict(list(STATE.state.flatten().items())[1:]))),
        replace(STATE, state=State({**STATE.state, "more": torch.zeros(1)})),
        replace(STATE, hidden_D=STATE.hidden_D[1:]),
        replace(STATE, hidden_D=STATE.hidden_D.half()),
    ],
)
def test_made_up_tensors_with_a_right_checksum(state: TextState) -> None:
    with pytest.raises(BadState, match=r"does not fit the model|not finite"):
        from_bytes(to_bytes(state, FACTS), LM, OWN)


@pytest.mark.parametrize(
    "facts",
    [
        {"tail": (11,)},
        {"tail": (-1,)},
        {"tail": ()},
        {"tail": (1,) * 17},
        {"tail": (True,)},
        {"tail": ("a",)},
        {"tokens": 0},
        {"tokens": 2**60},
        {"tokens": "9"},
        {"tokens": True},
        {"text_tail": "x" * 10_000},
        {"text_tail": None},
        {"created": "now"},
        {"created": float("nan")},
        {"created": 1},
        {"created": -1.0},
        {"fingerprint": 3},
    ],
)
def test_made_up_facts_with_a_right_checksum(facts: dict[str, Any]) -> None:
    with pytest.raises(BadState):
        from_bytes(to_bytes(STATE, replace(FACTS, **facts)), LM, OWN)


def test_counters_of_a_gpt_stay_inside_its_positions() -> None:
    lm: LoadedModel = loaded("gpt")
    state, own = lm.read("abcab\nabcabc"), fingerprint(lm)
    flat = state.state.flatten()
    name = next(name for name in flat if name.endswith("read"))
    flat[name] = flat[name] + 10
    wrong = replace(state, state=State.unflatten(flat))
    with pytest.raises(BadState, match="does not fit"):
        from_bytes(to_bytes(wrong, Facts(own, state.tokens, state.tail, "", 0.0)), lm, own)


def test_it_is_a_plain_safetensors_file() -> None:
    header = json.loads(DATA[8 : 8 + int.from_bytes(DATA[:8], "little")])
    assert json.loads(header["__metadata__"]["facts"])["tokens"] == 9
    assert header["hidden"]["dtype"] == "F32"
