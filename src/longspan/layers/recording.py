"""What attention layers compute with, kept for those who look inside (`longspan.inspection.attention`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# One for the whole process, not one per thread: what is compiled can then tell at no cost that it is off.
_kept: dict[nn.Module, list[Any]] | None = None


@contextmanager
def recording() -> Iterator[dict[nn.Module, list[Any]]]:
    """While it lasts, attention layers keep what they compute with: for every layer one entry per call."""
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
