"""From a pattern of letters to blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from longspan.errors import UserError
from longspan.layers.block import Block
from longspan.registry import BLOCKS

Makers: TypeAlias = Mapping[str, Callable[[], Block]]
"""For each letter of a pattern (config/pattern.py) what makes a new block of this kind."""

Arrange: TypeAlias = Callable[[Makers], list[Block]]
"""What makes the blocks of a stack of the kinds that an architecture has."""


def by_pattern(pattern: str | None, num_layers: int) -> Arrange:
    """One block per letter; without a pattern attention and feed-forward in every layer."""
    return lambda makers: [makers[letter]() for letter in pattern or "sf" * num_layers]


def registered_makers(config: Any) -> Makers:
    """Those of the blocks that plugins have added, for a model with the configuration `config`."""
    return {
        letter: partial(_make, letter, config)
        for letter, block in BLOCKS.known().items()
        if block.made_by is not None
    }


def _make(letter: str, config: Any) -> Block:
    block = BLOCKS[letter].resolve()(config, getattr(config, "blocks", {}).get(letter))
    if not isinstance(block, Block):
        raise UserError(
            f"the build of block '{letter}' returned a {type(block).__name__}: it must return a "
            "longspan.Block"
        )
    block.from_plugin = True  # its weights begin as its own code has set them
    return block
