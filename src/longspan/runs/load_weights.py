"""Loads the weights of a checkpoint into a model, after checking that they match."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan.errors import UserError
from longspan.models import LanguageModel
from longspan.runs import checkpoint


def load_weights(model: LanguageModel, path: Path) -> dict[str, Tensor]:
    """Load the weights of the checkpoint `path`, with windows as far grown as when they were saved."""
    saved = checkpoint.load(path)
    weights = saved.below("model")
    check_weights(model, weights, path)
    model.load_state_dict(weights)
    model.progress(trained(saved.facts, path))
    return weights


def trained(facts: Mapping[str, Any], path: Path, default: float = 1.0) -> float:
    """The fraction of its training that the weights of a checkpoint have seen; `default` if it is old."""
    done = facts.get("done", default)
    if not isinstance(done, float | int) or not 0.0 <= done <= 1.0:
        raise UserError(
            f"{path} is not a checkpoint of longspan: 'done' is {done!r}, not a number from 0 to 1"
        )
    return done


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
