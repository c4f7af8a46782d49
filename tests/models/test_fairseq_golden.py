"""fairseq's variant of adaptive span against recorded runs of its code, to the last digit.

fairseq clamps the stored spans in place at the start of every forward pass, here they are clamped after every
update: what a forward pass computes with, and what an update starts from, is the same. Only between an update
and the next forward pass may its stored values lie outside [0, 1].
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from longspan.bench.spans import learned_spans
from longspan.config import AdaptiveSpanConfig, EvaluationConfig
from longspan.data import token_array
from longspan.data.tokenizers.number import NumberTokenizer
from longspan.evaluation import evaluate
from longspan.interop import KINDS
from longspan.interop.translation import Tensors
from longspan.layers.learned_span import span_penalty
from longspan.models import Stack, build
from longspan.optim.adagrad import Adagrad
from longspan.state import State
from tests.models.golden import FOLDER, close

ORIGINAL = KINDS["fairseq-adaptive-span"]
CASES = ["fairseq_adaptive_span", "fairseq_adaptive_span_layer"]
VOCABULARY = 60


@dataclass(frozen=True)
class Recorded:
    tensors: dict[str, Tensor]
    original: dict[str, Any]
    rounding: dict[str, float]

    @property
    def config(self) -> AdaptiveSpanConfig:
        config = ORIGINAL.config(Tensors(self._under("weights.")), self.original["model"])
        assert isinstance(config, AdaptiveSpanConfig)
        return config

    def parameters(self, group: str) -> dict[str, Tensor]:
        return ORIGINAL.parameters(self._under(f"{group}."), self.config, VOCABULARY)

    def blocks(self) -> tuple[Tensor, ...]:
        return self.tensors["data"].split(self.original["tokens_per_sample"], dim=1)

    def _under(self, start: str) -> dict[str, Tensor]:
        return {name.removeprefix(start): t for name, t in self.tensors.items() if name.startswith(start)}


def load(case: str) -> Recorded:
    with safe_open(FOLDER / f"{case}.safetensors", "pt") as file:
        facts = json.loads(file.metadata()["facts"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return Recorded(tensors, facts["config"], facts["rounding"])


@pytest.fixture(params=CASES)
def recorded(request) -> Recorded:
    return load(request.param)


def build_original(recorded: Recorded) -> Stack:
    model = build(recorded.config, VOCABULARY)
    assert isinstance(model, Stack)
    model.load_state_dict(recorded.parameters("weights"))
    return model


def loss_as_fairseq_counts(recorded: Recorded, hidden: Tensor, x: Tensor, model: Stack) -> Tensor:
    """Targets lie inside the block, and the sum is divided by all tokens, also by those without a target."""
    targets = x[:, 1:]
    nll = model.head.nll(hidden[:, :-1], targets)
    return nll[targets != recorded.original["pad"]].sum() / x.numel()


def memory_lengths(state: State) -> list[int]:
    return [memory.shape[1] for memory in state.flatten().values()]


@torch.no_grad()
def test_outputs_with_carried_memory(recorded):
    model, bound = build_original(recorded).eval(), recorded.rounding["eval"]
    state = model.initial_state(2)
    assert memory_lengths(state) == recorded.tensors["cache_size"].tolist()
    for number, x in enumerate(recorded.blocks()):
        hidden, state = model(x, state)
        if f"eval.logprob.{number}" in recorded.tensors:
            expected = recorded.tensors[f"eval.logprob.{number}"]
            close(model.head.log_probs(hidden), expected, bound, f"log-probabilities {number}")
        loss = loss_as_fairseq_counts(recorded, hidden, x, model)
        close(loss, recorded.tensors[f"eval.loss.{number}"], bound, f"loss {number}")
        close(model.penalties()["span"], recorded.tensors[f"eval.aux_loss.{number}"], bound, "span loss")
        assert memory_lengths(state) == recorded.tensors[f"eval.cache_len.{number}"].tolist()


def test_every_gradient(recorded):
    model = build_original(recorded)
    state = model.initial_state(2)
    for number, x in enumerate(recorded.blocks()[:2]):
        group, bound = f"grad{number}", recorded.rounding[f"grad{number}"]
        model.zero_grad()
        hidden, state = model(x, state)
        loss, penalty = loss_as_fairseq_counts(recorded, hidden, x, model), model.penalties()["span"]
        close(loss, recorded.tensors[f"{group}.loss"], bound, "loss")
        close(penalty, recorded.tensors[f"{group}.aux_loss"], bound, "span loss")
        (loss + penalty).backward()
        state = state.detach()
        expected = recorded.parameters(group)
        if number == 1:
            assert expected.keys() == dict(model.named_parameters()).keys()
        for name, gradient in expected.items():
            close(model.get_parameter(name).grad, gradient, bound, f"{group} of {name}")


def test_three_updates(recorded):
    model, settings = build_original(recorded), recorded.original["optim"]
    optimizer = Adagrad(model.parameters(), lr=settings["lr"], clip=settings["adagrad_clip"])
    state = model.initial_state(2)
    for number, x in enumerate(recorded.blocks()[:3]):
        optimizer.param_groups[0]["lr"] = settings["lr"] * (number + 1) / settings["warmup_updates"]
        hidden, state = model(x, state)
        state = state.detach()
        loss, penalty = loss_as_fairseq_counts(recorded, hidden, x, model), model.penalties()["span"]
        close(loss, recorded.tensors[f"train.loss.{number}"], recorded.rounding["train"], f"loss {number}")
        expected = recorded.tensors[f"train.aux_loss.{number}"]
        close(penalty, expected, recorded.rounding["train"], f"span loss {number}")
        optimizer.zero_grad()
        (loss + penalty).backward()
        optimizer.step()
        model.after_update()
    after = recorded.parameters("step3")
    assert after.keys() == dict(model.named_parameters()).keys()
    for name, expected in after.items():
        if name.endswith("fraction_H"):  # recorded right after an update, before the clamp that follows
            expected = expected.clamp(0, 1)
        close(model.get_parameter(name), expected, recorded.rounding["step3"], name)


def test_stored_spans_may_lie_outside_and_are_reported_for_every_head(recorded):
    model, tensors = build_original(recorded), recorded.tensors
    spans = learned_spans(model)
    assert torch.stack([span.fraction_H for span in spans]).equal(tensors["span.value_after_forward"])
    sizes_LH = model.diagnostics()["spans_LH"]
    assert sizes_LH.shape == (len(spans), 4)
    assert sizes_LH.max(dim=1).values.tolist() == tensors["span.current_max"].tolist()
    costs = torch.stack([span_penalty([span]) for span in spans]) / recorded.config.span.penalty
    expected = tensors["span.value_after_forward"].mean(1) * recorded.config.span.limit
    torch.testing.assert_close(costs, expected)


def test_renormalised_it_is_another_model():
    recorded = load("fairseq_adaptive_span")
    model = build_original(recorded).eval()
    for block in model.blocks:
        if hasattr(block, "span"):
            block.span.renormalise = True
    x = recorded.blocks()[0]
    with torch.no_grad():
        log_probs, _ = model.log_probs(x, model.initial_state(2))
    assert (log_probs - recorded.tensors["eval.logprob.0"]).abs().max() > 0.1


def test_the_fairseq_protocol_is_the_recorded_walk(recorded: Recorded) -> None:
    """The recorded losses are sums over the targets inside a block, divided by all tokens of the block."""
    rows, length = recorded.tensors["data"], recorded.original["tokens_per_sample"]
    tokenizer = NumberTokenizer(VOCABULARY)
    score = evaluate(
        build_original(recorded),
        token_array(rows.flatten(), tokenizer),
        tokenizer=tokenizer,
        config=EvaluationConfig(protocol="fairseq", batch_size=len(rows)),
        block_length=length,
        device="cpu",
    )
    losses = [recorded.tensors[f"eval.loss.{k}"].double() for k in range(rows.shape[1] // length)]
    assert score.nats == pytest.approx(float(sum(losses)) * len(rows) * length, rel=1e-5)
    assert score.tokens == score.divisor == len(losses) * len(rows) * (length - 1)
