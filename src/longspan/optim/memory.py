"""Optimizer states (sums, moments): by parameter name, for checkpoints, and their size.

Settings such as rates are not included: they come from the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from longspan.models.interface import LanguageModel
from longspan.optim.adagrad import Adagrad
from longspan.optim.muon import Muon
from longspan.optim.normuon import NorMuon, lines_shape

_STEP_COUNT = 4  # bytes: Adam counts the steps of every parameter in a float32


def memories(model: LanguageModel, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """Every state tensor, as `<parameter name>.<state name>`."""
    names = _names(model)
    return {
        f"{names[parameter]}.{key}": value
        for optimizer in optimizers
        for parameter, memory in optimizer.state.items()
        for key, value in memory.items()
        if value is not None
    }


def restore_memories(
    model: LanguageModel, optimizers: list[Optimizer], remembered: Mapping[str, Tensor]
) -> None:
    """Load the state of earlier optimizers of the same kind into `optimizers`."""
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for name, tensor in remembered.items():
        parameter_name, _, key = name.rpartition(".")
        by_parameter.setdefault(parameter_name, {})[key] = tensor
    names = _names(model)
    for optimizer in optimizers:
        held = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        state = {i: by_parameter[name] for i, name in enumerate(held) if name in by_parameter}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _names(model: LanguageModel) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def state_bytes(optimizers: Iterable[Optimizer], size: Callable[[Tensor], int]) -> int:
    """The bytes of the state that these optimizers have after their first step.

    `size` gives the bytes of a tensor of the shape of a parameter.
    """
    return sum(
        _copies(optimizer, group) * size(parameter) + _more(optimizer, parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def _more(optimizer: Optimizer, parameter: Tensor) -> int:
    """Bytes of states that do not have the shape of the parameter; sharding does not divide them."""
    if isinstance(optimizer, NorMuon):
        return math.prod(lines_shape(parameter.shape)) * parameter.element_size()
    return _STEP_COUNT if isinstance(optimizer, torch.optim.Adam) else 0


def _copies(optimizer: Optimizer, group: Mapping[str, Any]) -> int:
    """How many tensors of its own shape the state of a parameter holds."""
    if isinstance(optimizer, Adagrad | Muon):
        return 1
    if isinstance(optimizer, torch.optim.SGD):
        return int(group["momentum"] != 0)
    return 2  # Adam, AdamW and LAMB: means of gradients and of their squares
