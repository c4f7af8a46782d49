"""The memory of a step: exact for what lies still, measured for activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.config import RunConfig, schema
from longspan.models import LanguageModel, Stack, build_run
from longspan.optim import build_optimizers, memories
from longspan.state import State
from longspan.training import activations
from longspan.training.activations import Activations, Line, measure_activations
from longspan.training.averaging import Average
from longspan.training.memory_plan import memory_plan
from longspan.training.step import Updater

from .tiny import TinyModel

VOCABULARY, LENGTH = 40, 24
SMALL = {"num_layers": 2, "width": 16, "num_heads": 2, "inner_width": 48}
SPAN = {"limit": 30, "ramp": 4, "start": 0.4, "penalty": 0.01}
MODELS: dict[str, dict[str, Any]] = {
    "adaptive-span": {**SMALL, "span": SPAN, "dropout": 0.1},
    "dynamic": {**SMALL, "architecture": "adaptive-span", "span": {**SPAN, "kind": "dynamic"}},
    "all-attention": {"num_layers": 2, "width": 16, "num_heads": 2, "num_persistent": 9, "span": SPAN},
    "transformer-xl": {**SMALL, "head_width": 8, "memory_length": 20},
    "sha-rnn": {"num_layers": 2, "width": 16, "inner_width": 48, "memory_length": 40, "dropout": 0.1},
    "gpt": {**SMALL, "context": 72},
    "modern": {**SMALL, "span": SPAN, "memory": "keys-values"},
}


def small(model: str = "adaptive-span", optimizer: str = "adamw", **training: Any) -> RunConfig:
    sizes = {"batch_size": 6, "block_length": LENGTH, "precision": "float32", "compile": False}
    table = {
        "model": {"architecture": model, **MODELS[model]},
        "training": sizes | training,
        "stage": [{"steps": 3, "learning_rate": 0.01, "optimizer": optimizer}],
    }
    return schema.read(RunConfig, table)


def built(config: RunConfig) -> LanguageModel:
    torch.manual_seed(1)
    return build_run(config, VOCABULARY)


def measured(model: LanguageModel) -> Activations:
    return measure_activations(model, LENGTH)


def total_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def text(lanes: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (lanes, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    return tokens[:, :-1], tokens[:, 1:]


def kept_bytes(model: LanguageModel, lanes: int, state: State) -> int:
    """What a forward pass keeps besides weights, buffers and the state before it, counted independently."""
    there = [*model.parameters(), *model.buffers(), *state.flatten().values()]
    known = {tensor.untyped_storage().data_ptr() for tensor in there}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    tokens_BT, targets_BT = text(lanes)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden_BTD, _ = model(tokens_BT, state)
        loss = model.head.nll(hidden_BTD, targets_BT)
    assert loss.requires_grad
    return sum(count for address, count in found.items() if address not in known)


def full_state(model: LanguageModel, lanes: int) -> State:
    state = model.initial_state(lanes)
    with torch.no_grad():
        for _ in range(3):  # the context of the GPT above
            _, state = model(text(lanes)[0], state)
    return state


@pytest.mark.parametrize("average", [0.0, 0.9])
@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "adamw", "lamb", "muon", "normuon", "sgd"])
def test_weights_gradients_optimizer_and_state_are_exact(optimizer: str, average: float) -> None:
    config = small(optimizer=optimizer, average=average)
    model = built(config)
    plan = memory_plan(model, config, measured(model))
    optimizers = build_optimizers(model, config.stage[0])
    averaged = Average(model, average).weights.values() if average else []
    before = model.initial_state(6)
    _, after = Updater(model).update(*text(6), before, optimizers)
    assert plan.weights == total_bytes(model.parameters()) + total_bytes(model.buffers())
    assert plan.gradients == total_bytes(p.grad for p in model.parameters() if p.grad is not None)
    assert plan.optimizer == total_bytes(memories(model, optimizers).values()) + total_bytes(averaged)
    states = (leaf for state in (before, after) for leaf in state.flatten().values())
    assert plan.carried_state == total_bytes(states)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "dynamic"])
def test_the_carried_state_is_that_of_a_full_memory(name: str) -> None:
    config = small(name)
    model = built(config)
    plan = memory_plan(model, config, measured(model))
    assert plan.carried_state == 2 * total_bytes(full_state(model, 6).flatten().values())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "dynamic"])
def test_activations_of_other_batch_sizes(name: str) -> None:
    model = built(small(name))
    found = measured(model)
    real = kept_bytes(model, 7, full_state(model, 7))
    assert found.plain.at(7) == pytest.approx(real, rel=0.3)
    # With checkpointing it is more than what is kept: one block at a time is computed again.
    checkpointed = built(small(name, activation_checkpointing=True))
    assert measured(checkpointed) == found
    assert found.recomputed is not None
    real_kept = kept_bytes(checkpointed, 7, full_state(checkpointed, 7))
    assert 0.7 * real_kept < found.recomputed.at(7) < 0.8 * found.plain.at(7)


@pytest.mark.parametrize("name", ["adaptive-span", "modern", "sha-rnn"])
def test_shorter_blocks_are_measured_if_a_model_is_slow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(small(name))
    whole = measure_activations(model, 256)
    monkeypatch.setitem(activations.MAX_FLOPS, "cpu", 1e6)
    lengths = []
    model.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    part = measure_activations(model, 256)
    assert max(lengths) < 256
    assert part.plain.at(9) == pytest.approx(whole.plain.at(9), rel=0.3)
    assert part.state == whole.state


@pytest.mark.parametrize("name", ["dynamic", "sha-rnn"])
def test_measuring_leaves_no_trace(name: str) -> None:
    model = built(small(name, activation_checkpointing=True)).eval()
    assert isinstance(model, Stack)
    random, around = torch.get_rng_state(), model.around_block
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    measured(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not model.training
    assert model.around_block is around


def test_a_model_without_blocks_is_measured_too() -> None:
    model = TinyModel(VOCABULARY)
    found = measured(model)
    assert found.recomputed is None
    assert found.plain.at(5) == pytest.approx(kept_bytes(model, 5, model.initial_state(5)), rel=0.01)


MEASURED = Activations(plain=Line(1000, 300), recomputed=Line(100, 50), state=Line(0, 8))


@pytest.mark.parametrize(
    ("training", "ranks", "expected"),
    [
        ({}, 1, (1000 + 6 * 300, 6)),
        ({"micro_batches": 2}, 1, (1000 + 3 * 300, 6)),
        ({"micro_batches": 4}, 1, (1000 + 2 * 300, 6)),  # the largest of them
        ({"accumulate": 3}, 1, (3 * (1000 + 6 * 300), 6)),
        ({"activation_checkpointing": True}, 1, (100 + 6 * 50, 6)),
        ({}, 4, (1000 + 2 * 300, 2)),
        ({"micro_batches": 2}, 2, (1000 + 2 * 300, 3)),
    ],
)
def test_activations_and_state_follow_the_options(
    training: dict[str, Any], ranks: int, expected: tuple[int, int]
) -> None:
    config = small(**training)
    plan = memory_plan(built(config), config, MEASURED, ranks=ranks)
    assert (plan.activations, plan.carried_state) == (expected[0], 2 * 8 * expected[1])


def test_sharding_divides_rows_and_gathers_one_block_at_a_time() -> None:
    config = small(average=0.9)
    model = built(config)
    assert isinstance(model, Stack)
    plain = memory_plan(model, config, MEASURED, ranks=4)
    plan = memory_plan(model, config, MEASURED, ranks=4, shard=True)
    parameters = list(model.parameters())
    whole, matrices = ([p for p in parameters if (p.ndim > 1) is kind] for kind in (False, True))
    own = total_bytes(whole) + sum(4 * -(-len(p) // 4) * p[0].numel() for p in matrices)
    blocks = [total_bytes(p for p in block.parameters() if p.ndim > 1) for block in model.blocks]
    gathered = total_bytes(matrices) - sum(blocks) + max(blocks)
    assert plan.weights == own + total_bytes(model.buffers()) + gathered
    assert plan.gradients == own + gathered
    assert plan.optimizer == 3 * own + 4 * len(parameters)
    assert plan.optimizer < 0.4 * plain.optimizer
    assert (plan.activations, plan.carried_state) == (plain.activations, plain.carried_state)


def test_the_plan_in_words() -> None:
    config = small()
    plan = memory_plan(built(config), config, Activations(Line(3 * 2**30, 0), None, Line(0, 150 * 2**20)))
    assert str(plan).startswith("4.8 GiB (weights ")
    assert str(plan).endswith(", activations 3 GiB, carried state 1.8 GiB)")
