"""The modern parts against their formulas: rotary positions, normed queries and keys, memories, the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.config import ModernConfig, SpanConfig
from longspan.flops import Shape, flops
from longspan.generation import Decoder
from longspan.kernels import span_attention as entry
from longspan.kernels.linear import squared_relu
from longspan.kernels.qk_norm_rope import Rope, qk_norm_rope
from longspan.layers.attention_heads import AttentionHeads
from longspan.layers.head_mixing import HeadGates
from longspan.layers.short_convolution import ShortConvolution
from longspan.models import LanguageModel, Stack, build
from longspan.output import SoftmaxHead

V, D, H, K, LIMIT = 13, 16, 2, 8, 6
CONFIG = ModernConfig(
    num_layers=2, width=D, num_heads=H, inner_width=24, span=SpanConfig(kind="fixed", limit=LIMIT)
)

EVERY_PART = {
    "num_layers": 6,
    "memory": "keys-values",
    "rope_fraction": 0.5,
    "qk_gain": 1.4,
    "key_offset": True,
    "value_embeddings": True,
    "token_shift": True,
    "residual_scalars": True,
}


def lively(config: ModernConfig) -> Stack:
    """A model in float64 whose blocks add something and whose gains are not 1."""
    torch.manual_seed(7)
    model = build(config, V).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("out.weight", "contract.weight")):
                parameter.normal_(std=0.3)
            elif name.endswith(("norm.weight", "gain_H")) or name.startswith("residual."):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif name.startswith("values.") or name.endswith("weight_HC"):
                parameter.normal_()
    assert isinstance(model, Stack)
    return model


def text(length: int, batch: int = 2) -> Tensor:
    return torch.randint(V, (batch, length), generator=torch.Generator().manual_seed(1))


def rotated(x: Tensor, first: Tensor, base: float = 10000.0) -> Tensor:
    """Keys at their positions."""
    rows = torch.cat([x, torch.zeros_like(x)], dim=2)
    return qk_norm_rope(rows, x.shape[2], first_B=first, rope=Rope(base)).k_BTHK


class TestRotary:
    def test_pairs_turn_as_complex_numbers(self) -> None:
        x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
        first = torch.tensor([4, 1000])
        pairs = torch.complex(x[..., :4], x[..., 4:])
        n = first[:, None, None, None] + torch.arange(5)[:, None, None]
        turned = pairs * torch.exp(1j * n * 50.0 ** (-torch.arange(4, dtype=torch.float64) / 4))
        expected = torch.cat([turned.real, turned.imag], dim=-1)
        torch.testing.assert_close(rotated(x, first, base=50.0), expected)

    def test_only_differences_count_however_far_the_text_has_gone(self) -> None:
        q, k = torch.randn(2, 1, 7, 1, 64)

        def scores(start: int) -> Tensor:
            first = torch.tensor([start])
            return torch.einsum("bthk,bshk->ts", rotated(q, first), rotated(k, first - 3))

        torch.testing.assert_close(scores(10**9), scores(0), rtol=1e-4, atol=1e-4)

    def test_half_precision_stays_half_precision(self) -> None:
        x = torch.randn(1, 3, 2, 8, dtype=torch.bfloat16)
        assert rotated(x, torch.tensor([0])).dtype == torch.bfloat16


ACTIVATIONS = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "squared-relu": lambda x: x.clamp(min=0) ** 2,
    "swiglu": lambda x: x * torch.sigmoid(x),
}


def by_hand(model: Stack, config: ModernConfig, tokens: Tensor) -> Tensor:
    """The model straight from its equations, the whole text at once."""
    h = model.embedding(tokens)
    t = tokens.shape[1]
    distance = torch.arange(t)[:, None] - torch.arange(t)
    seen = (distance >= 0) & (distance < LIMIT)
    blocks, stream = list(model.blocks), model.residual
    if stream is not None:
        first = h = rms(h)
    for layer, (attention, feed) in enumerate(zip(blocks[::2], blocks[1::2], strict=True)):
        if stream is not None:
            h = stream.scale_L[layer] * h + stream.embedding_L[layer] * first
        x = rms(h) * attention.norm.weight
        q, k, v = (
            layer(x).unflatten(-1, (H, K)).transpose(1, 2)
            for layer in (attention.query, attention.key, attention.value)
        )
        rotated = round(config.rope_fraction * (K // 2))
        if config.key_offset:
            still = [i for i in range(K) if i % (K // 2) >= rotated]
            k[..., still] = one_later(k, dim=2)[..., still]
        if attention.value_gates is not None:
            table = model.values[str(2 * layer)](tokens).unflatten(-1, (H, K)).transpose(1, 2)
            v = v + 2 * gates(attention.value_gates, x) * table
        if config.qk_norm:
            q, k = rms(q) * attention.qk_norm.gain_H[:, None, None], rms(k)
        pair = torch.arange(rotated, dtype=torch.float64)
        angle = torch.arange(t)[:, None] * config.rope_base ** (-pair / rotated)
        turn = torch.exp(1j * torch.nn.functional.pad(angle, (0, K // 2 - rotated)))
        if config.positions == "none":
            turn = torch.ones_like(turn)
        q, k = (torch.complex(x[..., : K // 2], x[..., K // 2 :]) * turn for x in (q, k))
        scores = (q @ k.mH).real / math.sqrt(K)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        h = h + attention.out((weights @ v).transpose(1, 2).flatten(2))
        x = rms(h) * feed.norm.weight
        if config.token_shift and layer == 0:
            x = torch.cat([one_later(x)[..., : D // 2], x[..., D // 2 :]], dim=-1)
        inner = feed.expand(x)
        inner = ACTIVATIONS[config.feed_forward](inner)
        if feed.gate is not None:
            inner = inner * feed.gate(x)
        h = h + feed.contract(inner)
    return rms(h) * model.final_norm.weight


def one_later(x: Tensor, dim: int = 1) -> Tensor:
    """Every token has what the token before had, the first one zeros."""
    first, rest = x.narrow(dim, 0, 1), x.narrow(dim, 0, x.shape[dim] - 1)
    return torch.cat([torch.zeros_like(first), rest], dim=dim)


def gates(module: HeadGates, x: Tensor) -> Tensor:
    return (x[..., :12] @ module.weight_HC.T).sigmoid().transpose(1, 2)[..., None]


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"memory": "keys-values", "rope_base": 100.0},
        {"feed_forward": "swiglu", "qk_norm": False},
        {"feed_forward": "gelu", "positions": "none"},
        {"feed_forward": "relu"},
        {"rope_fraction": 0.5, "qk_gain": 1.5},
        {"rope_fraction": 0.5, "key_offset": True, "memory": "keys-values"},
        {"value_embeddings": True, "memory": "keys-values"},
        {"token_shift": True, "feed_forward": "swiglu"},
        {"residual_scalars": True},
        EVERY_PART,
    ],
)
def test_it_is_its_equations(changes: dict) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    model, tokens = lively(config), text(15)
    with torch.no_grad():
        expected = by_hand(model, config, tokens)
        state, pieces = model.initial_state(2), []
        for piece in tokens.split([4, 1, 7, 3], dim=1):
            hidden, state = model(piece, state)
            pieces.append(hidden)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=1e-9, atol=1e-9)


def test_squared_relu() -> None:
    assert squared_relu(torch.tensor([-2.0, 0.0, 3.0])).tolist() == [0.0, 0.0, 9.0]


def test_every_part_has_a_gradient() -> None:
    model = lively(dataclasses.replace(CONFIG, **EVERY_PART))
    state = model.initial_state(2)
    for piece in text(12).split(6, dim=1):
        hidden, state = model(piece, state.detach())
    hidden.square().sum().backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == ["head.scores.weight"]


def test_a_fresh_model_adds_nothing_to_its_embeddings() -> None:
    model = build(CONFIG, V)
    tokens = text(9)
    hidden, _ = model(tokens, model.initial_state(2))
    torch.testing.assert_close(hidden, rms(model.embedding(tokens)))
    nll = model.head.nll(hidden, tokens)
    assert nll.mean().item() == pytest.approx(math.log(V), abs=0.1)


@pytest.mark.parametrize("every_part", [False, True])
def test_compiled_it_computes_the_same(monkeypatch: pytest.MonkeyPatch, every_part: bool) -> None:
    """Every norm is in compiled code, and gives its products what they multiply."""
    plain, compiled = torch.compile, []

    def without_code_generation(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        compiled.append(function.__qualname__)
        return plain(function, backend="aot_eager")  # all of compilation but the slow part

    def read(model: Stack) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=not every_part):
            state = model(text(4), model.initial_state(2))[1].detach()
            hidden, _ = model(text(20), state)
        weighed = (hidden * torch.linspace(-1, 1, D)).sum()
        gradients = torch.autograd.grad(weighed, [*model.parameters()], materialize_grads=True)
        return [hidden, *gradients]

    parts = EVERY_PART | {"num_layers": 3} if every_part else {"memory": "keys-values"}
    model = lively(dataclasses.replace(CONFIG, **parts)).float()
    expected = read(model)
    monkeypatch.setattr(torch, "compile", without_code_generation)
    model.compile()
    layers = sum(isinstance(block, AttentionHeads) for block in model.blocks)
    assert (
        compiled.count("AttentionHeads._normed") == compiled.count("AttentionHeads._add_residual") == layers
    )
    assert "RMSNorm.forward" in compiled
    for found, wanted in zip(read(model), expected, strict=True):
        assert (found - wanted).norm() <= (1e-5 if every_part else 0.02) * wanted.norm()


class TestConvolution:
    def test_it_is_its_equation_however_the_text_is_cut(self) -> None:
        block = ShortConvolution(5, 3, norm=torch.nn.RMSNorm).double()
        torch.nn.init.normal_(block.weight_ND)
        h = torch.randn(2, 9, 5, dtype=torch.float64)
        x = block.norm(h)
        expected = h.clone()
        for t in range(9):
            for n in range(min(3, t + 1)):
                expected[:, t] += block.weight_ND[n] * x[:, t - n]
        state, pieces = block.initial_state(2), []
        for piece in h.split([1, 4, 1, 3], dim=1):
            out, state = block(piece, state)
            pieces.append(out)
        torch.testing.assert_close(torch.cat(pieces, dim=1), expected)

    def test_the_model_has_one_before_its_first_layer(self) -> None:
        model = build(dataclasses.replace(CONFIG, convolution=4), V)
        assert [type(block) for block in model.blocks].count(ShortConvolution) == 1
        assert isinstance(model.blocks[0], ShortConvolution)
        assert model.blocks[0].weight_ND.shape == (4, D)
        assert not model.blocks[0].weight_ND.any()


def test_learned_distances_are_shared_and_as_many_as_the_limit() -> None:
    model = build(dataclasses.replace(CONFIG, positions="learned"), V)
    assert model.shared["positions"].keys_LK.shape == (LIMIT, K)
    assert sum("keys_LK" in name for name in model.state_dict()) == 1


class TestMemories:
    def gradient(self, model: LanguageModel) -> Tensor:
        """Of the keys' matrix, for one token whose text was read before."""
        state = model(text(5), model.initial_state(2))[1].detach()
        hidden, _ = model(text(1), state)
        (grad,) = torch.autograd.grad(hidden.square().sum(), model.blocks[0].key.weight)
        return grad

    def test_both_read_the_same_while_weights_stay(self) -> None:
        hidden = lively(CONFIG)
        kept = lively(dataclasses.replace(CONFIG, memory="keys-values"))
        state, other = hidden.initial_state(2), kept.initial_state(2)
        for piece in text(20).split(5, dim=1):
            one, state = hidden(piece, state)
            two, other = kept(piece, other)
            torch.testing.assert_close(one, two)
        assert other.branch("blocks").branch("0").tensor("memory").shape == (2, H * LIMIT, 2, K)

    def test_of_heads_with_limits_of_their_own_too(self) -> None:
        """Without renormalising, whatever is in the softmax of a layer takes its share of every head."""
        span = SpanConfig(
            limit=30, limit_shortest=4, ramp=3, start=0.5, softmax_over="layer", renormalise=False
        )
        hidden = lively(dataclasses.replace(CONFIG, span=span))
        kept = lively(dataclasses.replace(CONFIG, span=span, memory="keys-values"))
        state, other = hidden.initial_state(2), kept.initial_state(2)
        for piece in text(60).split(9, dim=1):
            one, state = hidden(piece, state)
            two, other = kept(piece, other)
            torch.testing.assert_close(one, two)

    def test_older_keys_come_from_older_weights(self) -> None:
        model = lively(dataclasses.replace(CONFIG, memory="keys-values"))
        _, before = model(text(5), model.initial_state(2))
        with torch.no_grad():
            model.blocks[0].key.weight.mul_(-1)
        _, after = model(text(1), before)
        old, new = (s.branch("blocks").branch("0").tensor("memory") for s in (before, after))
        for was, now in zip(old.split(LIMIT, dim=1), new.split(LIMIT, dim=1), strict=True):
            assert torch.equal(now[:, :-1], was[:, 1:])

    def test_gradients_reach_the_projections_through_hidden_states_only(self) -> None:
        anew = self.gradient(lively(CONFIG))
        kept = self.gradient(lively(dataclasses.replace(CONFIG, memory="keys-values")))
        assert not torch.allclose(anew, kept)
        # One token of its own, seen by itself alone in the block: what is left is its own key.
        assert kept.abs().sum() < anew.abs().sum()

    def test_kernels_that_cut_windows_themselves_give_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a GPU all heads run at once over what each remembers; here Triton's interpreter does."""
        gpu = pytest.importorskip("longspan.kernels.span_attention.gpu", reason="needs Triton")
        span = SpanConfig(limit=40, limit_shortest=5, ramp=4, start=0.6, memory="full")
        model = lively(dataclasses.replace(CONFIG, memory="keys-values", num_layers=1, span=span)).float()
        weights = torch.randn(2, 60, D)

        def read() -> list[Tensor]:
            model.zero_grad()
            state, out = model.initial_state(2), []
            for piece, weight in zip(text(60).split(20, 1), weights.split(20, 1), strict=True):
                hidden, state = model(piece.to(model.embedding.weight.device), state.detach())
                (hidden * weight.to(hidden.device)).sum().backward()
                out.append(hidden.detach())
            return [*out, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

        expected = read()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu":
            monkeypatch.setattr(entry, "_gpu_backend", lambda x, head_width: gpu)
        model.to(device)
        assert model.blocks[0]._backend_cuts_windows(torch.zeros(1, device=device))
        for found, value in zip(read(), expected, strict=True):
            torch.testing.assert_close(found.cpu(), value, rtol=1e-4, atol=1e-4)

    def test_groups_of_heads_may_change_from_block_to_block(self) -> None:
        span = SpanConfig(limit=600, ramp=2, start=0.01)
        model = lively(dataclasses.replace(CONFIG, memory="keys-values", span=span))
        twin = lively(dataclasses.replace(CONFIG, span=span))
        states = [model.initial_state(1), twin.initial_state(1)]
        for fractions in ([0.01, 0.01], [0.4, 0.01], [0.02, 0.6], [0.01, 0.3]):
            for learner in (model, twin):
                with torch.no_grad():
                    for block in learner.blocks[::2]:
                        block.span.fraction_H.copy_(torch.tensor(fractions))
                learner.after_update()
            read = [learner(text(40, 1), state) for learner, state in zip((model, twin), states, strict=True)]
            torch.testing.assert_close(read[0][0], read[1][0])
            states = [state for _, state in read]


def test_tokens_after_a_text_in_half_precision_are_in_the_precision_of_the_weights() -> None:
    model = lively(dataclasses.replace(CONFIG, **EVERY_PART)).float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, state = model(text(9), model.initial_state(2))
    decoder = Decoder(model, state)
    for tokens_B1 in text(5).split(1, dim=1):
        with torch.no_grad():
            expected_BTV, state = model.log_probs(tokens_B1, state)
        torch.testing.assert_close(decoder.read(tokens_B1), expected_BTV[:, 0], rtol=1e-5, atol=1e-5)


class TestHead:
    def test_scores_stay_within_the_cap(self) -> None:
        head = SoftmaxHead(D, V, bias=False, softcap=3.0)
        h = torch.randn(2, 4, D) * 50
        capped = 3 * torch.tanh(F.linear(h, head.scores.weight) / 3)
        torch.testing.assert_close(head.log_probs(h), capped.log_softmax(-1))
        assert head.log_probs(h).min() > -6 - math.log(V)

    def test_a_tied_head_has_no_weights_of_its_own(self) -> None:
        model = build(dataclasses.replace(CONFIG, tied=True), V)
        assert not list(model.head.parameters())
        h = torch.randn(1, 3, D)
        expected = F.linear(h, model.embedding.weight).log_softmax(-1)
        torch.testing.assert_close(model.head.log_probs(h), expected)
        assert flops(model.head, Shape(2, 5)) == 2 * V * D


def test_parameters_and_costs_by_hand() -> None:
    model = build(CONFIG, V)
    assert sum(p.numel() for p in model.parameters()) == (
        2 * V * D + D + 2 * (4 * D * D + H + D + 2 * D * 24 + D)
    )
    shape = Shape(2, 5)
    matrices = 2 * V * D + 2 * 2 * (4 * D * D + 2 * D * 24)
    attention = 2 * 2 * 2 * LIMIT * D
    anew = 2 * 2 * 2 * LIMIT * D * D / 5
    assert model.flops(shape) == pytest.approx(matrices + attention + anew)
    kept = build(dataclasses.replace(CONFIG, memory="keys-values"), V)
    assert kept.flops(shape) == pytest.approx(matrices + attention)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 16}, "need an even head width: width / num_heads is 1"),
        ({"num_heads": 3}, "not a multiple"),
        ({"softcap": 0.0}, "softcap must be above 0"),
        ({"dropout": 0.2, "repeat_dropout": 0.1}, "repeat_dropout must be above dropout"),
        ({"repeat_dropout": 1.0}, "repeat_dropout must be at least 0 and below 1"),
        ({"rope_fraction": 0.0}, "rope_fraction must be above 0"),
        ({"qk_gain": 0.0}, "qk_gain must be above 0"),
        ({"key_offset": True, "memory": "keys-values"}, "a smaller rope_fraction: of"),
        ({"key_offset": True, "rope_fraction": 0.99, "memory": "keys-values"}, "a smaller rope_fraction: of"),
        ({"key_offset": True, "positions": "none", "memory": "keys-values"}, 'needs positions = "rotary"'),
        ({"key_offset": True, "rope_fraction": 0.5}, "key_offset needs memory"),
        ({"value_embeddings": True}, "value_embeddings needs memory"),
        ({"rope_base": 1.0}, "rope_base must be above 1"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"convolution": 1}, "convolution must be"),
        ({"inner_width": 0}, "inner_width must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)
