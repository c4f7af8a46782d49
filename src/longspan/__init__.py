"""Longspan: language models that remember."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longspan.version import VERSION as __version__

if TYPE_CHECKING:
    from longspan.config.schema import option as option
    from longspan.config.schema import section as section
    from longspan.language_model import LoadedModel as LoadedModel
    from longspan.language_model import load as load
    from longspan.layers.block import Block as Block
    from longspan.models.interface import LanguageModel as LanguageModel
    from longspan.models.stack import Stack as Stack
    from longspan.registry import register_architecture as register_architecture
    from longspan.registry import register_block as register_block
    from longspan.registry import register_corpus as register_corpus
    from longspan.registry import register_tokenizer as register_tokenizer
    from longspan.state import State as State

# The public names, and where they are. They are imported when they are first used: `longspan --help` should
# not have to wait for torch.
_PLACES = {
    "Block": "longspan.layers.block",
    "LanguageModel": "longspan.models.interface",
    "LoadedModel": "longspan.language_model",
    "Stack": "longspan.models.stack",
    "State": "longspan.state",
    "load": "longspan.language_model",
    "option": "longspan.config.schema",
    "register_architecture": "longspan.registry",
    "register_block": "longspan.registry",
    "register_corpus": "longspan.registry",
    "register_tokenizer": "longspan.registry",
    "section": "longspan.config.schema",
}

__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
