"""The tensors of a checkpoint: everything, besides counters, that the next step depends on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from longspan import distributed
from longspan.errors import UserError
from longspan.models.interface import LanguageModel
from longspan.optim import memories, restore_memories
from longspan.runs import Checkpoint
from longspan.state import State
from longspan.training import parallel
from longspan.training.averaging import Average


def pack(
    model: LanguageModel,
    optimizers: list[Optimizer],
    state: State,
    device: torch.device,
    average: Average | None = None,
) -> dict[str, Tensor]:
    """Weights, optimizer states, carried state and random generators, by dotted names."""
    carried = state.flatten()
    if distributed.size() > 1:
        carried = {name: parallel.of_all_lanes(leaf) for name, leaf in carried.items()}
    return {
        **_under("model", model.state_dict()),
        **_under("optimizer", memories(model, optimizers)),
        **_under("state", carried),
        **_under(_generators_of(distributed.rank()), _generators(device)),
        **_under("average", average.weights if average is not None else {}),
    }


def optimizer_tensors(model: LanguageModel, optimizers: list[Optimizer]) -> list[str]:
    """The names of all optimizer states, for a checkpoint: which ones there are depends on the steps."""
    return sorted(memories(model, optimizers))


def unpack(
    checkpoint: Checkpoint,
    model: LanguageModel,
    optimizers: list[Optimizer],
    device: torch.device,
    lanes: range,
    average: Average | None = None,
    same_numbers: bool = False,
) -> State:
    """Restore everything that `pack` saved; the carried state of some `lanes` is returned.

    The checkpoint may be of another number of ranks. A rank that it does not know keeps its own generators,
    unless all ranks draw the `same_numbers`.
    """
    load_weights(model, checkpoint.below("model"))
    of_name = {name: parameter.detach() for name, parameter in model.named_parameters()}
    remembered = checkpoint.below("optimizer")
    if missing := set(checkpoint.facts.get("optimizer_tensors", [])) - remembered.keys():  # old ones lack it
        raise KeyError(f"optimizer.{min(missing)}")
    restore_memories(model, optimizers, _placed(remembered, of_name))
    if average is not None:
        average.restore(_placed(checkpoint.below("average"), of_name))
    generators = _generators_of(0 if same_numbers else distributed.rank())
    if distributed.rank() == 0 or checkpoint.below(generators):
        torch.set_rng_state(checkpoint.tensors[f"{generators}.cpu"])
        if device.type == "cuda" and f"{generators}.cuda" in checkpoint.tensors:
            torch.cuda.set_rng_state(checkpoint.tensors[f"{generators}.cuda"], device)
    carried = checkpoint.below("state")
    if missing := distributed.initial_state(model, 1).flatten().keys() - carried.keys():
        raise KeyError(f"state.{min(missing)}")
    return State.unflatten(carried).select(slice(lanes.start, lanes.stop)).to(device)


@contextmanager
def complete(path: Path) -> Iterator[None]:
    """Inside, what is missing in a checkpoint that was made or changed by hand is one clear error."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as problem:
        part = f"{problem}" if isinstance(problem, KeyError) else "a part of its training state"
        raise UserError(
            f"{path} cannot be resumed: it lacks {part}; start a new run from its weights with --init"
        ) from None


def load_weights(model: LanguageModel, weights: Mapping[str, Tensor]) -> None:
    """Load whole tensors into a model that may be sharded."""
    own = model.state_dict()
    model.load_state_dict({name: _like(weight, own.get(name)) for name, weight in weights.items()})


def _placed(tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor placed like the parameter whose name its own begins with, if they have the same shape."""
    placed = {}
    for name, tensor in tensors.items():
        parameter = parameters.get(name, parameters.get(name.rpartition(".")[0]))
        placed[name] = _like(tensor, parameter)
    return placed


def _like(full: Tensor, own: Tensor | None) -> Tensor:
    return full if own is None or own.shape != full.shape else parallel.placed_like(full, own)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _generators_of(rank: int) -> str:
    return "generator" if rank == 0 else f"generator_of_rank_{rank}"


def _generators(device: torch.device) -> dict[str, Tensor]:
    generators = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(device)
    return generators
