"""The GPT against plain torch over whole contexts: softmax, then the soft mask, then renormalised."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.config import GptConfig, RunConfig, SpanConfig, schema
from longspan.errors import UserError
from longspan.layers.attention import Attention
from longspan.layers.block import Block
from longspan.layers.feed_forward import FeedForward
from longspan.models import Stack, build
from longspan.state import State

VOCABULARY = 7
PLAIN = GptConfig(num_layers=2, width=12, num_heads=3, inner_width=20, context=9)
SPANS = dataclasses.replace(PLAIN, span=SpanConfig(limit=9, ramp=4, penalty=0.01))
BIASED = dataclasses.replace(SPANS, activation="relu", output_bias=True)


def make(config: GptConfig) -> Stack:
    """Weights large enough to matter, and a different span in every head."""
    torch.manual_seed(1)
    model = build(config, VOCABULARY).double().eval()
    assert isinstance(model, Stack)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(
                torch.rand_like(parameter) if name.endswith("fraction_H") else torch.randn_like(parameter) / 2
            )
    model.after_update()
    return model


def naive(
    model: Stack, tokens_T: Tensor, limit: int, ramp: int | None, *, activation: str = "gelu"
) -> Tensor:
    """The final hidden states of one context, with tables of all pairs of positions."""
    weights = dict(model.named_parameters())
    block, heads = len(tokens_T), 3

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    distance = torch.arange(block)[:, None] - torch.arange(block)
    h = weights["embedding.weight"][tokens_T] + weights["blocks.0.table.weight"][:block]
    for layer in range(2):
        here = f"blocks.{1 + 2 * layer}"
        x = norm(f"{here}.norm", h)
        q, k, v = (
            (x @ weights[f"{here}.{part}.weight"].mT).view(block, heads, 4).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        scores = (q @ k.mT / 4**0.5).masked_fill(distance < 0, -torch.inf)
        attention = scores.softmax(-1)
        if ramp is not None:
            span = weights[f"{here}.span.fraction_H"][:, None, None] * limit
            attention = attention * ((span - distance) / ramp + 1).clamp(0, 1)
            attention = attention / (attention.sum(-1, keepdim=True) + 1e-8)
        h = h + (attention @ v).transpose(0, 1).flatten(1) @ weights[f"{here}.out.weight"].mT
        if f"{here}.out.bias" in weights:
            h = h + weights[f"{here}.out.bias"]
        there = f"blocks.{2 + 2 * layer}"
        inner = F.linear(
            norm(f"{there}.norm", h), weights[f"{there}.expand.weight"], weights[f"{there}.expand.bias"]
        )
        h = h + F.linear(
            getattr(F, activation)(inner),
            weights[f"{there}.contract.weight"],
            weights[f"{there}.contract.bias"],
        )
    return norm("final_norm", h)


@pytest.mark.parametrize(
    ("config", "ramp"), [(PLAIN, None), (SPANS, 4), (BIASED, 4)], ids=["plain", "spans", "biased"]
)
def test_values_and_gradients_are_those_of_plain_torch(config: GptConfig, ramp: int | None) -> None:
    model = make(config)
    tokens = torch.randint(VOCABULARY, (2, 9))
    found, _ = model(tokens, model.initial_state(2))
    expected = torch.stack([naive(model, row, 9, ramp, activation=config.activation) for row in tokens])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # the share of the 1e-8
    named = {name: p for name, p in model.named_parameters() if not name.startswith("head")}
    weight = torch.randn_like(found)
    for name, one, other in zip(
        named,
        torch.autograd.grad((found * weight).sum(), list(named.values())),
        torch.autograd.grad((expected * weight).sum(), list(named.values())),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, msg=name)


def assert_contexts_apart(model: Stack, lengths: list[int]) -> None:
    """However a text is cut, it is read as its contexts, each from the beginning."""
    tokens = torch.randint(VOCABULARY, (2, 27))
    with torch.no_grad():
        expected = [model(piece, model.initial_state(2))[0] for piece in tokens.split(9, dim=1)]
        state, found = model.initial_state(2), []
        for piece in tokens.split(lengths, dim=1):
            hidden, state = model(piece, state)
            found.append(hidden)
    torch.testing.assert_close(torch.cat(found, 1), torch.cat(expected, 1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("config", [PLAIN, SPANS, BIASED], ids=["plain", "spans", "biased"])
@pytest.mark.parametrize("lengths", [[9, 9, 9], [27], [4, 23], [20, 1, 1, 5], [1] * 27], ids=str)
def test_a_token_sees_only_its_own_context(config: GptConfig, lengths: list[int]) -> None:
    model = make(config)
    assert_contexts_apart(model, lengths)


def test_rows_end_their_contexts_each_on_its_own() -> None:
    model = make(SPANS)
    first, second = torch.randint(VOCABULARY, (2, 12))
    with torch.no_grad():
        _, state = model(torch.stack([first[:5], first[:5]]), model.initial_state(2))
        found, _ = model(torch.stack([first[5:], second[:7]]), state.reset([1]))
        expected, _ = model(first[None], model.initial_state(1))
        other, _ = model(second[None], model.initial_state(1))
    torch.testing.assert_close(found[0], expected[0, 5:], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[1], other[0, :7], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("config", [PLAIN, SPANS], ids=["plain", "spans"])
def test_whole_contexts_are_read_without_asking_the_device(
    config: GptConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = make(config), torch.randint(VOCABULARY, (2, 40))
    state = model.initial_state(2)
    expected, _ = model(tokens, state)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "tolist", lambda _: pytest.fail("asks"))
        found = []
        for block in tokens[:, :36].split([9, 18, 9], dim=1):
            assert model.shape_key(state) is not None
            hidden, state = model(block, state)
            found.append(hidden)
    assert [leaf.shape[1] for leaf in state.flatten().values() if leaf.dim() > 1] == [0, 0]
    rest, state = model(tokens[:, 36:], state)
    torch.testing.assert_close(torch.cat([*found, rest], dim=1), expected)
    assert model.shape_key(state) is None  # rows may have been reset since


@torch.no_grad()
def test_a_decoding_step_adds_the_bias() -> None:
    attention = make(BIASED).blocks[1]
    assert isinstance(attention, Attention)
    attention.double()
    h_BTD = torch.randn(2, 6, 12, dtype=torch.float64)
    expected, _ = attention(h_BTD, attention.initial_state(2))
    _, state = attention(h_BTD[:, :5], attention.initial_state(2))
    step = attention.step_from(state)
    assert step is not None
    torch.testing.assert_close(step(h_BTD[:, 5][None])[0], expected[:, 5])


class RunningMean(Block):
    """A block of one's own, with a state that has as many numbers whatever was read."""

    def initial_state(self, batch_size: int) -> State:
        return State({"mean": torch.zeros(batch_size, PLAIN.width, dtype=torch.float64)})

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        mean_BD, means = state.tensor("mean"), []
        for h_BD in h_BTD.unbind(dim=1):
            mean_BD = (mean_BD + h_BD) / 2
            means.append(mean_BD)
        return h_BTD + torch.stack(means, dim=1), State({"mean": mean_BD})


@pytest.mark.parametrize("lengths", [[27], [9, 18], [4, 23], [1] * 27], ids=str)
def test_a_block_with_a_state_of_its_own_begins_again_with_each_context(lengths: list[int]) -> None:
    model = make(SPANS)
    model.blocks.append(RunningMean())
    assert_contexts_apart(model, lengths)


def test_fresh_weights_are_those_of_gpt_2() -> None:
    model = build(dataclasses.replace(SPANS, width=96, inner_width=128), 50)
    assert isinstance(model, Stack)
    for block in model.blocks:
        if isinstance(block, (Attention, FeedForward)):
            into = block.query if isinstance(block, Attention) else block.expand
            out = block.out if isinstance(block, Attention) else block.contract
            assert into.weight.std().item() == pytest.approx(0.02, rel=0.05)
            assert out.weight.std().item() == pytest.approx(0.02 / 2, rel=0.05)  # 2 x 2 layers
    hidden, _ = model(torch.zeros(1, 1, dtype=torch.long), model.initial_state(1))
    assert model.head.nll(hidden, torch.ones(1, 1, dtype=torch.long)).item() == pytest.approx(3.9, abs=0.8)


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ({"context": 0}, "model: context must be at least 1"),
        ({"width": 10, "num_heads": 4}, "model: width 10 is not a multiple of num_heads 4"),
        ({"context": 64, "span": {"limit": 65}}, "model: span.limit 65 is longer than the context, 64"),
        ({"dropout": 1.0}, "model: dropout must be at least 0 and below 1"),
    ],
)
def test_mistakes(model: dict[str, object], complaint: str) -> None:
    with pytest.raises(UserError) as mistake:
        schema.read(RunConfig, {"model": {"architecture": "gpt", **model}})
    assert str(mistake.value) == complaint
