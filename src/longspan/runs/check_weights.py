"""Checks that the weights of a checkpoint match a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.models import LanguageModel


def check_weights(model: LanguageModel, weights: Mapping[str, Tensor], path: Path) -> None:
    """Raise `UserError` for the first tensor of the checkpoint `path` that does not match `model`."""
    wanted, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in wanted.items():
        if name not in weights:
            raise UserError(f"{path} does not match the run's configuration: it has no tensor '{name}'")
        if weights[name].shape != tensor.shape:
            raise UserError(
                f"{path} does not match the run's configuration: '{name}' has shape "
                f"{list(weights[name].shape)} where the model has {list(tensor.shape)}"
            )
        if _is_broken(weights[name], may_be_infinite=name not in parameters):
            raise UserError(
                f"the weights in {path} are not finite ('{name}' has NaN or infinite values): "
                "use another checkpoint, or train again with a lower learning rate"
            )
    for name in weights:
        if name not in wanted:
            raise UserError(
                f"{path} does not match the run's configuration: the model has no tensor '{name}'"
            )


def _is_broken(tensor: Tensor, *, may_be_infinite: bool) -> bool:
    """Whether a tensor has NaN, or infinite values; a buffer, such as a mask, may be infinite."""
    if not tensor.is_floating_point():
        return False
    return bool(tensor.isnan().any() if may_be_infinite else not torch.isfinite(tensor).all())
