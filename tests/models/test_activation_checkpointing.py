"""Activation checkpointing: the same gradients and states, and fewer tensors kept for the backward pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.config import RunConfig, TrainingConfig
from longspan.hooks import added_penalties
from longspan.models import LanguageModel, Stack, build_run
from longspan.models.activation_checkpointing import recomputed
from longspan.training.step import Updater

from .test_contract import NAMES, SMALL, VOCABULARY, make, with_span


def blocks(length: int = 24) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    texts = [torch.randint(VOCABULARY, (4, length + 1), generator=draw) for _ in range(2)]
    return [(text[:, :-1], text[:, 1:]) for text in texts]


def trained(model: LanguageModel, **options: Any) -> dict[str, Tensor]:
    """Losses, gradients and states of two blocks, and the buffers after them."""
    torch.manual_seed(7)
    updater, state, found = Updater(model.train(), **options), model.initial_state(4), {}
    for number, (tokens_BT, targets_BT) in enumerate(blocks()):
        nats, state = updater.gradients(tokens_BT, targets_BT, state)
        found[f"nats {number}"] = nats
        found |= {f"state {number}: {name}": leaf for name, leaf in state.flatten().items()}
    found |= {f"gradient: {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer: {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return found | {"random numbers": torch.rand(3)}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("variant", NAMES)
def test_gradients_and_states_are_bit_identical(variant: str) -> None:
    plain, checkpointed = (make(variant).float() for _ in range(2))
    assert isinstance(checkpointed, Stack)
    checkpointed.around_block = recomputed
    equal(trained(plain), trained(checkpointed))


@pytest.mark.parametrize("options", [{"micro_batches": 3}, {"precision": "bf16"}], ids=str)
def test_with_micro_batches_and_in_bf16(options: dict[str, Any]) -> None:
    config = dataclasses.replace(with_span(kind="dynamic"), dropout=0.2, embedding_dropout=0.1)
    found = []
    for on in (False, True):
        torch.manual_seed(3)
        training = TrainingConfig(activation_checkpointing=on)
        found.append(trained(build_run(RunConfig(model=config, training=training), VOCABULARY), **options))
    equal(*found)


def test_penalties_are_added_once() -> None:
    """Also if the backward pass runs where penalties are collected."""
    config = RunConfig(
        model=with_span(kind="dynamic"), training=TrainingConfig(activation_checkpointing=True)
    )
    model = build_run(config, VOCABULARY).train()
    ((tokens_BT, _), *_) = blocks()
    with added_penalties() as added:
        hidden_BTD, _ = model(tokens_BT, model.initial_state(4))
        layers = len(added)
        (hidden_BTD.sum() + sum(added)).backward()
        assert len(added) == layers == SMALL.num_layers


def kept(model: LanguageModel) -> int:
    """Elements that a forward pass keeps for the backward pass."""
    elements = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal elements
        elements += tensor.numel()
        return tensor.detach()

    ((tokens_BT, _), *_) = blocks(64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden_BTD, _ = model.train()(tokens_BT, model.initial_state(4))
    assert hidden_BTD.requires_grad
    return elements


def test_blocks_keep_nothing_but_their_input() -> None:
    config = RunConfig(model=SMALL)
    model = build_run(config, VOCABULARY)
    before = kept(model)
    training = TrainingConfig(activation_checkpointing=True)
    model = build_run(dataclasses.replace(config, training=training), VOCABULARY)
    assert isinstance(model, Stack)
    tokens = 4 * 64  # the embedding keeps them, and every block its input
    assert kept(model) <= tokens * (1 + len(model.blocks) * SMALL.width) < before / 8


def test_without_gradients_blocks_are_called_once() -> None:
    training = TrainingConfig(activation_checkpointing=True)
    model = build_run(RunConfig(model=SMALL, training=training), VOCABULARY)
    assert isinstance(model, Stack)
    calls = 0

    def around(*inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        return recomputed(*inputs)

    model.around_block = around
    ((tokens_BT, _), *_) = blocks()
    with torch.no_grad():
        model(tokens_BT, model.initial_state(4))
    model.eval()(tokens_BT, model.initial_state(4))
    assert calls == 0
    model.train()(tokens_BT, model.initial_state(4))
    assert calls == len(model.blocks)
