"""Single tokens through `Decoder`, which may take another way than blocks do."""

from __future__ import annotations

import pytest
import torch

from longspan import generation
from longspan.generation import Decoder
from longspan.kernels import linear, span_attention
from longspan.kernels.linear import GEMV_ROWS
from longspan.kernels.span_attention import AttentionContext, decode_cpu, decode_gpu, gpu
from longspan.layers import block
from longspan.layers.attention import Attention
from longspan.models import Stack
from longspan.state import State

from .test_contract import NAMES, VARIANTS, VOCABULARY, copies, equal, make, random_tokens, warm_state


@pytest.mark.parametrize("batch", [1, GEMV_ROWS + 1])
@pytest.mark.parametrize("variant", sorted(NAMES))
def test_reads_what_the_model_reads(variant: str, batch: int) -> None:
    model = make(variant)
    state = warm_state(model, batch)
    before, decoder = copies(state), Decoder(model, state)
    carried = state
    for tokens_B1 in random_tokens(batch, 6).split(1, dim=1):
        with torch.no_grad():
            expected_BTV, carried = model.log_probs(tokens_B1, carried)
        found_BV = decoder.read(tokens_B1)
        assert found_BV.shape == (batch, VOCABULARY)
        torch.testing.assert_close(found_BV, expected_BTV[:, 0], rtol=1e-8, atol=1e-9)
    assert equal(state, before)


def test_where_its_capture_fails_every_token_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []

    def fail(work: object) -> None:
        attempts.append(1)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    model = make("adaptive-span")
    state, tokens = warm_state(model, 1), random_tokens(1, 6).split(1, dim=1)
    sound = Decoder(model, state)
    expected = [sound.read(token).clone() for token in tokens]
    monkeypatch.setattr(generation, "_on_gpu", lambda _: True)
    monkeypatch.setattr(generation, "capture", fail)
    decoder = Decoder(model, state)
    with pytest.warns(UserWarning, match="slower: operation not permitted when stream is capturing$") as seen:
        found = [decoder.read(token).clone() for token in tokens]
    assert len(seen) == len(attempts) == 1
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# Their state goes through `forward`.
CARRIED = ("sha-rnn", "gpt", "transformer-xl, from zeros, pre-norm")


only_interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter is for machines without a GPU"
)


def lively(variant: str) -> Stack:
    model = make(variant).float()
    assert isinstance(model, Stack)
    if variant.startswith("transformer-xl"):
        with torch.no_grad():  # or all scores are nearly the same
            for parameter in model.blocks.parameters():
                parameter.mul_(20)
        model.refresh()
    return model


def off_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with a memory have only steps that need no CPU."""
    plain = block.carried
    monkeypatch.setattr(
        block, "carried", lambda read, prepare, state: None if state else plain(read, prepare, state)
    )


def check_step_of_a_gpu(
    model: Stack, state: State, monkeypatch: pytest.MonkeyPatch, *, part: int = 16, steps: int = 3
) -> None:
    """Triton's interpreter does it. Parts are so short that most heads have several."""
    carried, tokens, expected = state, random_tokens(2, steps).split(1, dim=1), []
    with torch.no_grad():
        for tokens_B1 in tokens:
            expected_BTV, carried = model.log_probs(tokens_B1, carried)
            expected.append(expected_BTV[:, 0])
    attended, attend = [], decode_gpu.OneToken.attend
    monkeypatch.setattr(
        decode_gpu.OneToken, "attend", lambda self, *qkv: attended.append(1) or attend(self, *qkv)
    )
    monkeypatch.setattr(decode_gpu, "PART", part)
    monkeypatch.setattr(span_attention, "_gpu_backend", lambda *_: gpu)
    monkeypatch.setattr(linear, "use_triton", lambda _: True)
    off_a_cpu(monkeypatch)
    before, decoder = copies(state), Decoder(model, state)
    for tokens_B1, expected_BV in zip(tokens, expected, strict=True):
        torch.testing.assert_close(decoder.read(tokens_B1), expected_BV, rtol=1e-4, atol=2e-5)
    assert len(attended) == steps * sum(isinstance(layer, Attention) for layer in model.blocks)
    assert equal(state, before)


# Windows of hundreds of tokens. With the usual length of a part every head still has several.
LONG = ("adaptive-span, dynamic, long", "modern, long, keys and values")

# Windows of few tokens: so many steps are more than a ring has rows.
SHORT = ("adaptive-span, windows", "modern, windows", "modern, limits that rise")


@only_interpreted
@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith(CARRIED)])
def test_on_a_gpu_steps_read_what_the_model_reads(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively(variant)
    part, steps = 64 if variant in LONG else 16, 5 if variant in SHORT else 3
    check_step_of_a_gpu(model, warm_state(model, 2), monkeypatch, part=part, steps=steps)


@only_interpreted
def test_a_memory_shorter_than_the_window_is_no_longer_in_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively("transformer-xl, from zeros")
    short = warm_state(model, 2).map(lambda leaf: leaf[:, -3:] if leaf.dim() > 2 else leaf)
    check_step_of_a_gpu(model, short, monkeypatch)


@only_interpreted
def test_rings_are_as_precise_as_what_is_read_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively("modern, keys and values")
    check_step_of_a_gpu(model, warm_state(model, 2).to(dtype=torch.bfloat16), monkeypatch)


@only_interpreted
def test_the_edge_of_a_span_is_exact_in_half_precision() -> None:
    """bf16 counts to 256."""
    torch.manual_seed(0)
    window, edge = 320, 300.0
    past, q, k, v = torch.randn(1, window, 2, 8), *(torch.randn(1, 1, 8) for _ in range(3))
    spans = torch.tensor([edge])
    found, expected = (
        decode_gpu.OneToken(AttentionContext(past=[past], windows=[window], spans=spans_H, ramp=16)).attend(
            q, torch.cat([k, v], dim=1)
        )
        for spans_H in (spans.bfloat16(), spans)
    )
    torch.testing.assert_close(found, expected)


def test_what_is_remembered_moves_and_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_cpu, "SPARE_ROWS", 3)
    monkeypatch.setattr(decode_cpu, "GROUP", 0)  # every window on its own
    model = make("adaptive-span")
    assert isinstance(model, Stack)
    state = model.initial_state(2)
    decoder = Decoder(model, state)
    for tokens_B1 in random_tokens(2, 17).split(1, dim=1):
        with torch.no_grad():
            expected_BTV, state = model.log_probs(tokens_B1, state)
        torch.testing.assert_close(decoder.read(tokens_B1), expected_BTV[:, 0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith(CARRIED)])
def test_on_a_cpu_steps_keep_a_past_of_their_own(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read as many single tokens as there are, and `forward` of attention none."""
    model = make(variant)
    decoder = Decoder(model, warm_state(model, 1))
    monkeypatch.setattr(Attention, "forward", None)
    decoder.read(random_tokens(1, 1))


def test_two_decoders_go_on_from_one_state() -> None:
    model = make("adaptive-span")
    state = warm_state(model, 1)
    one, other = Decoder(model, state), Decoder(model, state)
    tokens = random_tokens(1, 4)
    expected = [one.read(token_B1).clone() for token_B1 in tokens.split(1, dim=1)]
    found = [other.read(token_B1) for token_B1 in tokens.split(1, dim=1)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_heads_are_kept_apart_only_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_cpu, "GROUP", 100)
    assert decode_cpu.head_groups([160, 16, 40, 900, 128]) == [[1, 2], [4, 0], [3]]
    assert decode_cpu.head_groups([10, 120, 10]) == [[0, 2], [1]]
    assert decode_cpu.head_groups([7]) == [[0]]
    assert decode_cpu.head_groups([7, 9, 7, 9], [1, 2, 2, 1]) == [[0, 3], [2, 1]]
