"""The architectures, and the table of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from longspan.config import ModelConfig, RunConfig
from longspan.models.adaptive_span import adaptive_span
from longspan.models.all_attention import all_attention
from longspan.models.gpt import gpt
from longspan.models.interface import LanguageModel
from longspan.models.modern import modern
from longspan.models.sha_rnn import sha_rnn
from longspan.models.stack import Stack
from longspan.models.supernet import Supernet, supernet
from longspan.models.transformer_xl import transformer_xl
from longspan.models.windows import set_windows

__all__ = ["ARCHITECTURES", "LanguageModel", "Stack", "Supernet", "build", "build_run"]

ARCHITECTURES: dict[str, Callable[[Any, int], LanguageModel]] = {
    "adaptive-span": adaptive_span,
    "all-attention": all_attention,
    "gpt": gpt,
    "modern": modern,
    "sha-rnn": sha_rnn,
    "transformer-xl": transformer_xl,
}


def build(config: ModelConfig, vocabulary_size: int) -> LanguageModel:
    """The model that `config` describes, with fresh weights from torch's random generator."""
    model = ARCHITECTURES[config.architecture](config, vocabulary_size)
    span = getattr(config, "span", None)
    if span is not None and span.windows is not None:
        set_windows(model, span.windows)
    return model


def build_run(config: RunConfig, vocabulary_size: int) -> LanguageModel:
    """The model that a run trains: with [search] the supernet of its model, else the model itself."""
    if config.search is not None:
        return supernet(config, vocabulary_size)
    return build(config.model, vocabulary_size)
