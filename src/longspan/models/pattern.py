"""From a pattern of letters to blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from longspan.layers.block import Block

Makers: TypeAlias = Mapping[str, Callable[[], Block]]
"""For each letter of a pattern (config/pattern.py) what makes a new block of this kind."""

Arrange: TypeAlias = Callable[[Makers], list[Block]]
"""What makes the blocks of a stack of the kinds that an architecture has."""


def by_pattern(pattern: str | None, num_layers: int) -> Arrange:
    """One block per letter; without a pattern attention and feed-forward in every layer."""
    return lambda makers: [makers[letter]() for letter in pattern or "sf" * num_layers]
