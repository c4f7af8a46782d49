"""Records the inputs of attention layers for inspection (`longspan.inspection.attention`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# One for the whole process, not one per thread: compiled code then tests at no cost whether it is off.
_kept: dict[nn.Module, list[Any]] | None = None


@contextmanager
def recording() -> Iterator[dict[nn.Module, list[Any]]]:
    """Inside, the inputs of attention layers are recorded: for every layer one entry per call."""
    global _kept
    if _kept is not None:
        raise RuntimeError("attention is being recorded already")
    _kept = {}
    try:
        yield _kept
    finally:
        _kept = None


def keep(layer: nn.Module, *inputs: Any) -> None:
    """Called by attention layers in every forward pass."""
    if _kept is not None:
        _kept.setdefault(layer, []).append(inputs)
