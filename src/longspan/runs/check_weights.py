"""Checks that the weights of a checkpoint match a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from longspan.errors import UserError
from longspan.models import LanguageModel


def check_weights(model: LanguageModel, weights: Mapping[str, Tensor], path: Path) -> None:
    """Raise `UserError` for the first tensor of the checkpoint `path` that does not match `model`."""
    wanted = model.state_dict()
    for name, tensor in wanted.items():
        if name not in weights:
            raise UserError(f"{path} does not match the run's configuration: it has no tensor '{name}'")
        if weights[name].shape != tensor.shape:
            raise UserError(
                f"{path} does not match the run's configuration: '{name}' has shape "
                f"{list(weights[name].shape)} where the model has {list(tensor.shape)}"
            )
    for name in weights:
        if name not in wanted:
            raise UserError(
                f"{path} does not match the run's configuration: the model has no tensor '{name}'"
            )
