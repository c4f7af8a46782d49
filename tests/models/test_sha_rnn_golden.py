"""SHA-RNN against recorded runs of the original code, which are time-first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from longspan.config import EvaluationConfig, ShaRnnConfig
from longspan.data.token_file import write_token_file
from longspan.data.tokenizers.character import CharacterTokenizer
from longspan.evaluation import evaluate
from longspan.interop import KINDS
from longspan.interop.translation import Tensors
from longspan.models import LanguageModel, build
from longspan.optim import Lamb
from longspan.state import State
from tests.models.golden import FOLDER, close

ORIGINAL = KINDS["sha-rnn"]


@dataclass(frozen=True)
class Recorded:
    tensors: dict[str, Tensor]
    original: dict[str, Any]
    rounding: dict[str, float]

    @property
    def config(self) -> ShaRnnConfig:
        weights = {
            name.removeprefix("weights."): t
            for name, t in self.tensors.items()
            if name.startswith("weights.")
        }
        options = {**self.original["model"], **self.original["criterion"]}
        config = ORIGINAL.config(Tensors(weights), options)
        assert isinstance(config, ShaRnnConfig)
        return config

    def block_of(self, layer: int, part: str) -> int:
        """Where in our stack a part of a layer is."""
        before = sum(2 + self.config.attends(earlier) for earlier in range(layer))
        return before + {"recurrent": 0, "attention": 1, "boom": 1 + self.config.attends(layer)}[part]

    def parameters(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under `prefix` in this project's names and shapes."""
        found = {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}
        return ORIGINAL.parameters(found, self.config, self.original["model"]["ntoken"])

    def blocks(self) -> list[tuple[Tensor, Tensor]]:
        """(inputs, targets) of every recorded block, batch first."""
        length, data = self.original["bptt"], self.tensors["data"].T
        starts = range(0, length * self.original["blocks"], length)
        return [(data[:, s : s + length], data[:, s + 1 : s + length + 1]) for s in starts]


def load(case: str) -> Recorded:
    with safe_open(FOLDER / f"{case}.safetensors", "pt") as file:
        facts = json.loads(file.metadata()["facts"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return Recorded(tensors, facts["config"], facts["rounding"])


@pytest.fixture(params=["sha_rnn", "sha_rnn_split"])
def recorded(request) -> Recorded:
    return load(request.param)


def build_original(recorded: Recorded) -> LanguageModel:
    model = build(recorded.config, recorded.original["model"]["ntoken"])
    model.load_state_dict(recorded.parameters("weights."))
    return model.eval()


def batch_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1)


@torch.no_grad()
def test_outputs_with_carried_memory(recorded):
    """The memory is full after the third block: from then on each block forgets as much as it brings."""
    model, bound = build_original(recorded), recorded.rounding["eval"]
    state = model.initial_state(2)
    for number, (x, y) in enumerate(recorded.blocks()):
        log_probs, _ = model.log_probs(x, state)
        hidden, state = model(x, state)
        close(hidden, batch_first(recorded.tensors[f"eval.h.{number}"]), bound, f"block {number}")
        loss = model.head.nll(hidden, y).mean()
        close(loss, recorded.tensors[f"eval.loss.{number}"], bound, f"loss {number}")
        close(-log_probs.gather(-1, y[..., None]).mean(), loss, bound, "loss by log-probabilities")
        if not recorded.config.splits:
            expected = batch_first(recorded.tensors[f"eval.logprob.{number}"])
            close(log_probs, expected, bound, f"log-probabilities {number}")
    assert_state(recorded, state)


def assert_state(recorded: Recorded, state: State) -> None:
    """The state after the last block, theirs [1, B, D] and [M, B, D]."""
    for layer in range(recorded.config.num_layers):
        lstm = state.branch("blocks").branch(str(recorded.block_of(layer, "recurrent")))
        for ours, theirs in (("hidden", "hidden_h"), ("cell", "hidden_c")):
            expected = recorded.tensors[f"eval.after_block_5.{theirs}.{layer}"][0]
            close(lstm.tensor(ours), expected, recorded.rounding["eval"], f"{ours} of layer {layer}")
    layer = recorded.config.num_layers - 2
    attention = state.branch("blocks").branch(str(recorded.block_of(layer, "attention")))
    memory = batch_first(recorded.tensors[f"eval.after_block_5.mem.{layer}"])
    close(attention.tensor("memory"), memory, recorded.rounding["eval"], "memory")
    assert attention.tensor("filled").tolist() == [recorded.config.memory_length] * 2


@torch.no_grad()
def test_one_token_at_a_time(recorded):
    model = build_original(recorded)
    state = model.decoding_state(model.initial_state(2))
    expected = batch_first(recorded.tensors["gen.h"])
    for t, token in enumerate(torch.cat([x for x, _ in recorded.blocks()], dim=1).split(1, dim=1)):
        hidden, state = model(token, state)
        close(hidden, expected[:, t : t + 1], recorded.rounding["gen"], f"token {t}")


@pytest.mark.parametrize("number", [0, 3])
def test_every_gradient(recorded, number):
    model, group = build_original(recorded).train(), f"grad{number}"
    state = model.initial_state(2)
    for x, _ in recorded.blocks()[:number]:
        state = model(x, state)[1].detach()
    x, y = recorded.blocks()[number]
    loss = model.head.nll(model(x, state)[0], y).mean()
    close(loss, recorded.tensors[f"{group}.loss"], recorded.rounding[group], "loss")
    loss.backward()
    expected = recorded.parameters(f"{group}.")
    assert expected.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        close(parameter.grad, expected[name], recorded.rounding[group], name)


@pytest.mark.parametrize(("lamb", "min_trust", "group"), [("pypi", 0.0, ""), ("fork", 0.25, "fork_")])
def test_three_updates(recorded, lamb, min_trust, group):
    model, settings = build_original(recorded).train(), recorded.original["optim"]
    optimizer = Lamb(
        model.parameters(), lr=settings["lr"], weight_decay=settings["wdecay"], min_trust=min_trust
    )
    state = model.initial_state(2)
    for number, (x, y) in enumerate(recorded.blocks()[:3]):
        optimizer.param_groups[0]["lr"] = recorded.tensors[f"{lamb}.train.lr.{number}"].item()
        hidden, state = model(x, state)
        state = state.detach()
        loss = model.head.nll(hidden, y).mean()
        expected = recorded.tensors[f"{lamb}.train.loss.{number}"]
        close(loss, expected, recorded.rounding[f"{group}train"], f"loss {number}")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        optimizer.step()
    after = recorded.parameters(f"{lamb}.step3.")
    assert after.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        close(parameter, after[name], recorded.rounding[f"{group}step3"], name)


def test_the_originals_own_training_loop(recorded):
    """Blocks of drawn lengths, the state carried from one to the next. Of matrices the losses tell."""
    model, settings = build_original(recorded).train(), recorded.original["optim"]
    data, bound = recorded.tensors["data"].T, recorded.rounding["loop"]
    optimizer = Lamb(model.parameters(), lr=settings["lr"], weight_decay=settings["wdecay"], min_trust=0.0)
    state = model.initial_state(2)
    places, rates, losses = (recorded.tensors[f"loop.{part}"] for part in ("start_and_len", "lr", "loss"))
    for number, (start, length) in enumerate(places.tolist()):
        optimizer.param_groups[0]["lr"] = rates[number].item()
        hidden, state = model(data[:, start : start + length], state)
        state = state.detach()
        loss = model.head.nll(hidden, data[:, start + 1 : start + length + 1]).mean()
        close(loss, losses[number], bound, f"loss {number}")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        optimizer.step()
    vectors = recorded.parameters("loop.end.")
    assert vectors.keys() == {name for name, p in model.named_parameters() if p.squeeze().dim() < 2}
    for name, expected in vectors.items():
        close(model.get_parameter(name), expected, bound, name)


def test_full_evaluation_by_the_original_protocol(recorded, tmp_path):
    """The score of a stream, by the original's own way of walking and averaging, from tokens on disk."""
    vocabulary_size = recorded.original["model"]["ntoken"]
    alphabet = CharacterTokenizer("".join(map(chr, range(0x4E00, 0x4E00 + vocabulary_size))))
    text = alphabet.decode(recorded.tensors["data"].T.flatten().tolist())
    score = evaluate(
        build_original(recorded),
        write_token_file(tmp_path / "stream", alphabet, [text.encode()]),
        tokenizer=alphabet,
        config=EvaluationConfig(protocol="sha-rnn", batch_size=2),
        block_length=recorded.original["bptt"],
        device="cpu",
    )
    expected = recorded.tensors["evaluate.loss"]
    close(torch.tensor(score.loss), expected, recorded.rounding["evaluate"], "loss")
