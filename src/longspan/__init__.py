"""Longspan: language models that remember.

The Python interface is the names below; docs/python.md describes it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from longspan.version import VERSION as __version__

if TYPE_CHECKING:
    from longspan import nn as nn
    from longspan import optim as optim
    from longspan import testing as testing
    from longspan.api import Run as Run
    from longspan.api import context_curve as context_curve
    from longspan.api import dynamic_evaluation as dynamic_evaluation
    from longspan.api import evaluate as evaluate
    from longspan.api import resume as resume
    from longspan.api import train as train
    from longspan.config import RunConfig as RunConfig
    from longspan.config.schema import option as option
    from longspan.config.schema import section as section
    from longspan.errors import UserError as UserError
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

# Every public name and its module, imported when it is first used: `longspan --help` needs no torch.
_PUBLIC = {
    "Block": "longspan.layers.block",
    "LanguageModel": "longspan.models.interface",
    "LoadedModel": "longspan.language_model",
    "Run": "longspan.api",
    "RunConfig": "longspan.config",
    "Stack": "longspan.models.stack",
    "State": "longspan.state",
    "UserError": "longspan.errors",
    "context_curve": "longspan.api",
    "dynamic_evaluation": "longspan.api",
    "evaluate": "longspan.api",
    "load": "longspan.language_model",
    "option": "longspan.config.schema",
    "register_architecture": "longspan.registry",
    "register_block": "longspan.registry",
    "register_corpus": "longspan.registry",
    "register_tokenizer": "longspan.registry",
    "resume": "longspan.api",
    "section": "longspan.config.schema",
    "train": "longspan.api",
}

_PACKAGES = ("nn", "optim", "testing")

__all__ = ["__version__", *_PACKAGES, *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"longspan.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
