"""The tensors of a checkpoint: everything, besides counters, that the next step depends on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from longspan.models.interface import LanguageModel
from longspan.optim import memories, restore_memories
from longspan.runs import Checkpoint
from longspan.state import State


def pack(
    model: LanguageModel, optimizers: list[Optimizer], state: State, device: torch.device
) -> dict[str, Tensor]:
    """Weights, optimizer states, carried state and random generators, by dotted names."""
    return {
        **_under("model", model.state_dict()),
        **_under("optimizer", memories(model, optimizers)),
        **_under("state", state.flatten()),
        **_under("generator", _generators(device)),
    }


def optimizer_tensors(model: LanguageModel, optimizers: list[Optimizer]) -> list[str]:
    """The names of all optimizer states, for a checkpoint: which ones there are depends on the steps."""
    return sorted(memories(model, optimizers))


def unpack(
    checkpoint: Checkpoint, model: LanguageModel, optimizers: list[Optimizer], device: torch.device
) -> State:
    """Restore everything that `pack` saved; the carried state is returned."""
    model.load_state_dict(checkpoint.below("model"))
    remembered = checkpoint.below("optimizer")
    if missing := set(checkpoint.facts.get("optimizer_tensors", [])) - remembered.keys():  # old ones lack it
        raise KeyError(f"optimizer.{min(missing)}")
    restore_memories(model, optimizers, remembered)
    torch.set_rng_state(checkpoint.tensors["generator.cpu"])
    if device.type == "cuda" and "generator.cuda" in checkpoint.tensors:
        torch.cuda.set_rng_state(checkpoint.tensors["generator.cuda"], device)
    carried = checkpoint.below("state")
    if missing := model.initial_state(1).flatten().keys() - carried.keys():
        raise KeyError(f"state.{min(missing)}")
    return State.unflatten(carried).to(device)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _generators(device: torch.device) -> dict[str, Tensor]:
    generators = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(device)
    return generators
