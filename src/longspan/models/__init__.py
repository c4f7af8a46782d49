"""Models, and building them from a configuration."""

from __future__ import annotations

from longspan.config import ModelConfig, RunConfig, SpanConfig
from longspan.errors import UserError
from longspan.models.activation_checkpointing import recomputed
from longspan.models.interface import LanguageModel
from longspan.models.memory import check_memory
from longspan.models.stack import Stack
from longspan.models.supernet import Supernet, supernet
from longspan.models.windows import set_windows
from longspan.registry import ARCHITECTURES

__all__ = ["LanguageModel", "Stack", "Supernet", "build", "build_run"]


def build(config: ModelConfig, vocabulary_size: int) -> LanguageModel:
    """The model that `config` describes, with initial weights from torch's random generator."""
    name = ARCHITECTURES.name_of(type(config))
    if name is None:
        raise UserError(f"no architecture is registered with the configuration class {type(config).__name__}")
    model = ARCHITECTURES[name].resolve()(config, vocabulary_size)
    if not isinstance(model, LanguageModel):
        raise UserError(
            f"the build function of architecture '{name}' returned a {type(model).__name__}: it must return "
            "a longspan.LanguageModel"
        )
    span = getattr(config, "span", None)
    if isinstance(span, SpanConfig) and span.windows is not None:
        set_windows(model, span.windows)
    return model


def build_run(config: RunConfig, vocabulary_size: int) -> LanguageModel:
    """The model that a run trains: with [search] a supernet, else the model itself."""
    check_memory(lambda: _build_run(config, vocabulary_size), config.architecture)
    model = _build_run(config, vocabulary_size)
    if config.training.activation_checkpointing and isinstance(model, Stack):
        model.around_block = recomputed
    return model


def _build_run(config: RunConfig, vocabulary_size: int) -> LanguageModel:
    if config.search is not None:
        return supernet(config, vocabulary_size)
    return build(config.model, vocabulary_size)
