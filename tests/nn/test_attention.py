"""`span_attention` for plain tensors: against the loops of the reference, and against torch's attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.errors import UserError
from longspan.kernels.span_attention import AttentionContext, reference
from longspan.nn import (
    DynamicSpan,
    LearnedDistanceKeys,
    LearnedSpan,
    PersistentMemory,
    SinusoidDistances,
    span_attention,
)

from .plain import every_weight_learns, round_trips

B, H, T, M, K = 2, 3, 5, 7, 4


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def loops(tensors: dict[str, Tensor], **options: Any) -> Tensor:
    """Every head on its own, over exactly its window."""
    outs = []
    for h, window in enumerate(options.pop("windows")):

        def part(name: str, h: int = h) -> Tensor | None:
            return tensors[name][h, None] if name in tensors else None

        q, k, v, past_k, past_v = (tensors[name][:, h, None] for name in ("q", "k", "v", "past_k", "past_v"))
        keys = tensors.get("position_keys")
        persistent = part("persistent_k"), part("persistent_v")
        context = AttentionContext(
            past=[torch.cat([past_k, past_v], dim=1).transpose(1, 2)],
            windows=[window],
            position_keys=keys if keys is None or keys.dim() == 2 else keys[h, None],
            content_bias_HK=part("content_bias"),
            position_bias_HK=part("position_bias"),
            persistent=None
            if persistent[0] is None or persistent[1] is None
            else (persistent[0], persistent[1]),
            **{"spans": part("spans"), **options},
        )
        outs.append(reference.span_attention(q, k, v, context))
    return torch.cat(outs, dim=1)


CASES: dict[str, dict[str, Any]] = {
    "one window": {"window": 6},
    "windows of each head": {"window": [9, 2, 6]},
    "spans": {"window": 12, "spans": [0.0, 2.5, 8.0]},
    "spans, long and short": {"window": [40, 5, 200], "spans": [30.5, 1.0, 150.0]},
    "spans, not renormalised": {"window": [12, 4, 8], "spans": [0.0, 2.5, 8.0], "renormalise": False},
    "sees itself": {"window": [3, 12, 6], "sees_itself": True},
    "sees itself, partly filled": {"window": 9, "sees_itself": True, "filled": [0, 3]},
}


@pytest.mark.parametrize("extras", [(), ("positions",), ("positions per head", "biases", "persistent")])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_loops(case: str, extras: tuple[str, ...]) -> None:
    torch.manual_seed(3)
    options = dict(CASES[case])
    tensors = {name: leaf(B, H, T, K) for name in ("q", "k", "v")}
    tensors |= {name: leaf(B, H, M, K) for name in ("past_k", "past_v")}
    if "positions" in extras:
        tensors["position_keys"] = leaf(200, K)
    if "positions per head" in extras:
        tensors["position_keys"] = leaf(H, 200, K)
    if "biases" in extras:
        tensors |= {"content_bias": leaf(H, K), "position_bias": leaf(H, K)}
    if "persistent" in extras:
        tensors |= {"persistent_k": leaf(H, 2, K), "persistent_v": leaf(H, 2, K)}
    if (spans := options.pop("spans", None)) is not None:
        tensors["spans"] = torch.tensor(spans, dtype=torch.float64, requires_grad=True)
    window, sees_itself = options.pop("window"), options.pop("sees_itself", False)
    filled = torch.tensor(options.pop("filled", [M] * B))
    named = {name: x for name, x in tensors.items() if name[-2:] not in ("_k", "_v")}
    if "persistent_k" in tensors:
        named["persistent"] = tensors["persistent_k"], tensors["persistent_v"]  # type: ignore[assignment]
    q, k, v = (named.pop(name) for name in "qkv")
    past = tensors["past_k"], tensors["past_v"]
    if case == "sees itself, partly filled":
        named["filled"] = filled
    found = span_attention(
        q, k, v, past=past, window=window, ramp=3, sees_itself=sees_itself, **options, **named
    )
    expected = loops(
        tensors,
        windows=[window] * H if isinstance(window, int) else window,
        ramp=3,
        first_distance=0 if sees_itself else 1,
        filled_B=filled if sees_itself else None,
        **options,
    )
    # Heads of a group share a window, which changes the share of the 1e-8 in the renormalisation.
    close = {"rtol": 3e-6, "atol": 3e-6} if case == "spans, long and short" else {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(found, expected, **close)
    weights = torch.randn_like(found)
    leaves = list(tensors.values())
    ours = torch.autograd.grad((found * weights).sum(), leaves, allow_unused=True)
    theirs = torch.autograd.grad((expected * weights).sum(), leaves, allow_unused=True)
    for name, a, b in zip(tensors, ours, theirs, strict=True):
        zero = torch.zeros_like(tensors[name])
        torch.testing.assert_close(zero if a is None else a, zero if b is None else b, **close, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_spans_it_is_causal_attention(dtype: torch.dtype) -> None:
    q, k, v = (leaf(B, H, 33, 16, dtype=dtype) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(span_attention(q, k, v, window=33, sees_itself=True), expected)
    spans = torch.full((H,), 40.0, dtype=dtype)  # a span beyond the text hides nothing
    found = span_attention(q, k, v, window=80, spans=spans, sees_itself=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_many_blocks_with_a_past_are_one_block() -> None:
    q, k, v = (leaf(B, H, 48, 16, dtype=torch.float32) for _ in range(3))
    spans = torch.tensor([0.0, 3.5, 20.0])
    whole = span_attention(q, k, v, window=40, spans=spans, ramp=4)
    parts = [
        span_attention(
            *(x[:, :, t : t + 16] for x in (q, k, v)),
            past=(k[:, :, :t], v[:, :, :t]),
            window=40,
            spans=spans,
            ramp=4,
        )
        for t in range(0, 48, 16)
    ]
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [40, [16, 32, 150]])
@torch.no_grad()
def test_token_by_token_is_one_block(window: int | list[int]) -> None:
    """Without gradients single tokens have a backend of their own."""
    q, k, v = (torch.randn(B, H, 20, K, dtype=torch.float64) for _ in range(3))
    options: dict[str, Any] = {"spans": torch.tensor([3.5, 0.0, 14.0], dtype=torch.float64), "ramp": 4}
    options |= {"window": window, "position_keys": torch.randn(150, K, dtype=torch.float64)}
    whole = span_attention(q, k, v, **options)
    for t in range(20):
        now = (x[:, :, t, None] for x in (q, k, v))
        one = span_attention(*now, past=(k[:, :, :t].float(), v[:, :, :t].float()), **options)
        torch.testing.assert_close(one[:, :, 0], whole[:, :, t], rtol=1e-5, atol=1e-6)  # the past is float32


def test_dropout_only_if_asked_for() -> None:
    q, k, v = (leaf(B, H, T, K) for _ in range(3))
    plain = span_attention(q, k, v, window=4)
    assert torch.equal(span_attention(q, k, v, window=4), plain)
    assert not torch.allclose(span_attention(q, k, v, window=4, dropout=0.5), plain)


def test_mistakes_are_named() -> None:
    q = leaf(B, H, T, K)
    for options, message in (
        ({"window": 0}, "window must be at least 1"),
        ({"window": [3, 4]}, "one for each of the 3 heads"),
        ({"window": 3, "spans": torch.ones(2)}, r"spans must be one for every head, \[3\], not \[2\]"),
        (
            {"window": 9, "position_keys": torch.ones(8, K)},
            "a window of 9 needs as many position_keys, not 8",
        ),
        ({"window": 3, "past": (q, q[:, :, 1:])}, "past must be keys and values of the same shape"),
        ({"window": 3, "filled": torch.zeros(B)}, "filled needs sees_itself=True"),
    ):
        with pytest.raises(UserError, match=message):
            span_attention(q, q, q, **options)  # type: ignore[arg-type]


def test_persistent_memory() -> None:
    memory = PersistentMemory(H, 6, K).double()
    keys, values = memory()
    torch.testing.assert_close(keys, memory.keys_HPK * math.sqrt(K))
    torch.testing.assert_close(values, memory.values_HPK * math.sqrt(6))
    q, k, v = (leaf(B, H, T, K) for _ in range(3))
    out = span_attention(q, k, v, window=4, persistent=memory())
    assert not torch.allclose(out, span_attention(q, k, v, window=4))
    every_weight_learns(memory, out)
    round_trips(memory, PersistentMemory(H, 6, K).double())


def test_learned_distance_keys() -> None:
    positions = LearnedDistanceKeys(9, K).double()
    q, k, v = (leaf(B, H, T, K) for _ in range(3))
    out = span_attention(q, k, v, window=9, position_keys=positions())
    # Position 0 sees nine zero keys and zero values, position 1 one key at distance 1 and eight zero keys.
    scores = (q[:, :, 1] @ positions().T + F.pad((q[:, :, 1] * k[:, :, 0]).sum(-1, keepdim=True), (0, 8))) / 2
    assert not out[:, :, 0].any()
    torch.testing.assert_close(out[:, :, 1], scores.softmax(-1)[..., :1] * v[:, :, 0])
    every_weight_learns(positions, out)
    round_trips(positions, LearnedDistanceKeys(9, K).double())


@pytest.mark.parametrize("clamp", [None, 3])
def test_sinusoid_distances(clamp: int | None) -> None:
    positions = SinusoidDistances(6, H, K, clamp=clamp).double()
    nn.init.normal_(positions.content_bias)
    nn.init.normal_(positions.position_bias)
    q, k, v = (leaf(B, H, T, K) for _ in range(3))
    biases = {"content_bias": positions.content_bias, "position_bias": positions.position_bias}
    out = span_attention(q, k, v, window=T, position_keys=positions(T), sees_itself=True, **biases)
    expected = torch.empty_like(out)
    for t in range(T):
        scores = []
        for s in range(t + 1):
            distance = min(t - s, T if clamp is None else clamp)
            angles = [distance / 10000 ** (i / 6) for i in (0, 2, 4)]
            wave = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
            r_HK = (positions.project.weight @ wave).view(H, K)
            content = ((q[:, :, t] + positions.content_bias) * k[:, :, s]).sum(-1)
            scores.append((content + ((q[:, :, t] + positions.position_bias) * r_HK).sum(-1)) / math.sqrt(K))
        weights = torch.stack(scores, dim=-1).softmax(-1)
        expected[:, :, t] = (weights[..., None] * v[:, :, : t + 1]).sum(2)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)  # angles are float32
    every_weight_learns(positions, out)
    round_trips(positions, SinusoidDistances(6, H, K, clamp=clamp).double())


class Head(nn.Module):
    """A layer that fits into `nn.Sequential`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.span = nn.Linear(width, 3 * width), LearnedSpan(2, 20, ramp=4, start=0.3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        out = span_attention(q, k, v, spans=self.span(), ramp=self.span.ramp, window=self.span.windows)
        return x + out.transpose(1, 2).flatten(2)


def test_in_a_sequential_model() -> None:
    model = nn.Sequential(nn.Embedding(11, 8), Head(8), nn.LayerNorm(8), Head(8), nn.Linear(8, 11)).double()
    tokens = torch.randint(11, (2, 30))
    every_weight_learns(model, model(tokens))
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 11
    assert torch.equal(model(tokens)[:, :20], model(changed)[:, :20])  # nothing sees the future
    assert not torch.equal(model(tokens)[:, 21], model(changed)[:, 21])


def test_spans_of_every_query() -> None:
    """Heads of different windows are computed in another order: each keeps its own spans."""
    torch.manual_seed(3)
    span = DynamicSpan(12, H, 150, ramp=4, start=0.1).double()
    nn.init.normal_(span.direction_HD)
    x_BTD, windows = leaf(B, T, 12), [300, 160, 300]
    tensors = {name: leaf(B, H, T, K) for name in ("q", "k", "v")}
    tensors |= {name: leaf(B, H, M, K) for name in ("past_k", "past_v")}
    past = tensors["past_k"], tensors["past_v"]
    qkv = (tensors[name] for name in ("q", "k", "v"))
    found = span_attention(*qkv, window=windows, past=past, spans=span(x_BTD), ramp=span.ramp)
    spans_BHT = span(x_BTD)
    expected = torch.cat(
        [
            loops(
                {name: tensor[b : b + 1, h : h + 1] for name, tensor in tensors.items()},
                windows=[windows[h]],
                spans=spans_BHT[b : b + 1, h : h + 1],
                ramp=4,
            )
            for b in range(B)
            for h in range(H)
        ]
    ).view(B, H, T, K)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    leaves = [x_BTD, span.direction_HD, span.bias_H]
    for gradient, wanted in zip(
        torch.autograd.grad(found.sin().sum(), leaves),
        torch.autograd.grad(expected.sin().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-7)
    penalty = DynamicSpan(12, H, 150, penalty=0.5).penalty(torch.full((B, H, T), 3.0))
    assert penalty.item() == 1.5
