"""Adaptive span and all-attention against recorded runs of the original code, to the last digit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from longspan.bench.spans import learned_spans
from longspan.config import EvaluationConfig
from longspan.data.token_file import write_token_file
from longspan.data.tokenizers.character import CharacterTokenizer
from longspan.evaluation import evaluate
from longspan.layers.learned_span import span_penalty
from longspan.models import Stack, build
from longspan.optim.adagrad import Adagrad
from longspan.state import State
from tests.models.golden import CASES, Golden, close


@pytest.fixture(params=CASES)
def golden(request) -> Golden:
    return Golden.load(request.param)


def build_original(golden: Golden) -> Stack:
    model = build(golden.config(), golden.original["data_params"]["vocab_size"])
    assert isinstance(model, Stack)
    own = dict(model.named_parameters())
    weights = golden.parameters("weights")
    assert own.keys() == weights.keys()
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
    model.after_update()
    return model


def memory_lengths(state: State) -> list[int]:
    return [memory.shape[1] for memory in state.flatten().values()]


def loss_and_penalty(model: Stack, x: Tensor, y: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
    hidden, state = model(x, state)
    loss = model.head.nll(hidden, y).mean()
    return loss, loss + sum(model.penalties().values()), state.detach()


def test_outputs_with_carried_memory(golden):
    model = build_original(golden).eval()
    state = model.initial_state(golden.tensors["data"].shape[0])
    assert memory_lengths(state) == golden.tensors["cache_size"].tolist()
    with torch.no_grad():
        for number, (x, y) in enumerate(golden.blocks()):
            log_probs, state = model.log_probs(x, state)
            close(
                log_probs,
                golden.tensors[f"eval.logprob.{number}"],
                golden.rounding["eval"],
                f"block {number}",
            )
            loss = -log_probs.gather(-1, y[..., None]).mean()
            close(loss, golden.tensors[f"eval.loss.{number}"], golden.rounding["eval"], f"loss {number}")
            assert memory_lengths(state) == golden.tensors[f"eval.cache_len.{number}"].tolist()


def test_spans_that_change_while_memory_is_carried():
    golden = Golden.load("adaptive_span_trim")
    model = build_original(golden).eval()
    state = model.initial_state(2)
    with torch.no_grad():
        for x, _ in golden.blocks():
            _, state = model(x, state)
        for span, fractions in zip(
            learned_spans(model), golden.tensors["short_cache.span_value"], strict=True
        ):
            span.fraction_H.copy_(fractions)
        model.after_update()
        for number, (x, _) in enumerate(golden.blocks()[:2]):
            log_probs, state = model.log_probs(x, state)
            expected = golden.tensors[f"short_cache.logprob.{number}"]
            close(log_probs, expected, golden.rounding["short_cache"], f"block {number}")
            assert memory_lengths(state) == golden.tensors[f"short_cache.cache_len.{number}"].tolist()


def test_every_gradient(golden):
    model = build_original(golden)
    state = model.initial_state(golden.tensors["data"].shape[0])
    for number, (x, y) in enumerate(golden.blocks()[:2]):
        group = f"grad{number}"
        model.zero_grad()
        loss, total, state = loss_and_penalty(model, x, y, state)
        close(loss, golden.tensors[f"{group}.loss"], golden.rounding[group], "loss")
        close(total, golden.tensors[f"{group}.total_loss"], golden.rounding[group], "loss with penalty")
        total.backward()
        expected = golden.parameters(group)
        assert expected.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            close(parameter.grad, expected[name], golden.rounding[group], f"{group} of {name}")


def optimizer_of(golden: Golden, model: Stack) -> torch.optim.Optimizer:
    """The original's optimizer with the history its checkpoint holds."""
    settings = golden.original["optim_params"]
    if settings["optim"] == "adagrad":
        optimizer = Adagrad(model.parameters(), lr=settings["lr"], clip=settings["grad_clip"])
        history = "sum"
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=settings["momentum"])
        history = "momentum_buffer"
    stored = golden.parameters(f"optimizer.{history}")
    for name, parameter in model.named_parameters():
        optimizer.state[parameter][history] = stored[name].clone()
    return optimizer


def test_three_updates(golden):
    model = build_original(golden)
    optimizer = optimizer_of(golden, model)
    settings = golden.original["optim_params"]
    state = model.initial_state(golden.tensors["data"].shape[0])
    for number, (x, y) in enumerate(golden.blocks()[:3]):
        warmup, update = settings["lr_warmup"], golden.updates_before + number + 1
        rate = settings["lr"] * (min(1, update / warmup) if warmup else 1)
        assert rate == pytest.approx(golden.tensors[f"train.lr.{number}"].item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, total, state = loss_and_penalty(model, x, y, state)
        close(loss, golden.tensors[f"train.loss.{number}"], golden.rounding["train"], f"loss {number}")
        model.zero_grad()
        total.backward()
        if settings["optim"] != "adagrad":
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings["grad_clip"])
        optimizer.step()
        model.after_update()
    for name, expected in golden.parameters("step3").items():
        close(model.get_parameter(name), expected, golden.rounding["step3"], name)


def test_reported_span_sizes():
    for case in CASES[:3]:
        golden = Golden.load(case)
        model = build_original(golden)
        sizes_LH = model.diagnostics()["spans_LH"]
        assert sizes_LH.max(dim=1).values.tolist() == golden.tensors["span.current_max"].tolist()
        penalties = torch.stack([span_penalty([span]) for span in learned_spans(model)])
        close(penalties, golden.tensors["span.loss"], golden.rounding["span"], "span loss")
        trims = [span.limit - span.windows[0] for span in learned_spans(model)]
        assert trims == golden.tensors["span.trim_len"].tolist()


def test_full_evaluation_by_the_original_protocol(golden, tmp_path):
    """The score of a stream, by the original's own way of walking and averaging, from tokens on disk."""
    rows_BN = golden.tensors["full_eval.data"]
    alphabet = CharacterTokenizer("".join(map(chr, range(ord("0"), ord("0") + 60))))
    text = alphabet.decode(rows_BN.flatten().tolist())
    token_file = write_token_file(tmp_path / "stream", alphabet, [text.encode()])
    score = evaluate(
        build_original(golden),
        token_file,
        tokenizer=alphabet,
        config=EvaluationConfig(protocol="adaptive-span", batch_size=rows_BN.shape[0]),
        block_length=golden.original["model_params"]["block_size"],
        device="cpu",
    )
    close(torch.tensor(score.loss), golden.tensors["full_eval.loss"], golden.rounding["full_eval"], "loss")


def test_softmax_over_own_span_is_the_same_but_for_the_epsilon():
    """Each head computed over its own span only: the 1e-8 then weighs less, everything else is equal."""
    golden = Golden.load("adaptive_span_trim")
    exact = build_original(golden).eval()
    config = golden.config()
    own = build(
        dataclasses.replace(config, span=dataclasses.replace(config.span, softmax_over="head")), 60
    ).eval()
    own.load_state_dict(exact.state_dict())
    state, own_state = exact.initial_state(2), own.initial_state(2)
    with torch.no_grad():
        for x, _ in golden.blocks():
            expected, state = exact.log_probs(x, state)
            found, own_state = own.log_probs(x, own_state)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
