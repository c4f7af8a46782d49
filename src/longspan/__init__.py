"""Longspan: language models that remember."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longspan.version import VERSION as __version__

if TYPE_CHECKING:
    from longspan.language_model import LoadedModel as LoadedModel
    from longspan.language_model import load as load

__all__ = ["LoadedModel", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """Fetch `load` when it is first asked for: `longspan --help` should not have to wait for torch."""
    if name in ("LoadedModel", "load"):
        from importlib import import_module

        return getattr(import_module("longspan.language_model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
