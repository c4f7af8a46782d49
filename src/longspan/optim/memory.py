"""What optimizers remember of each parameter (sums, moments), by the parameter's name.

Settings are left out: they come from the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim import Optimizer

from longspan.models.interface import LanguageModel


def memories(model: LanguageModel, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """Every remembered tensor under the parameter's name, a dot and what it is."""
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
    """Let `optimizers` go on with what others of the same kind remembered."""
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
