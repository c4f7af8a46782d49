"""Builds the blocks of a pattern."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from longspan.errors import UserError
from longspan.layers.block import Block
from longspan.registry import BLOCKS

Makers: TypeAlias = Mapping[str, Callable[[], Block]]
"""For each letter of a pattern (config/pattern.py), a function that makes a new block."""

Arrange: TypeAlias = Callable[[Makers], list[Block]]
"""A function that makes the blocks of a stack, given the block kinds of an architecture."""


def by_pattern(pattern: str | None, num_layers: int) -> Arrange:
    """One block per letter; without a pattern every layer is attention and feed-forward."""
    return lambda makers: [makers[letter]() for letter in pattern or "sf" * num_layers]


def registered_makers(config: Any) -> Makers:
    """The makers of blocks registered by plugins, for a model with the configuration `config`."""
    return {
        letter: partial(_make, letter, config)
        for letter, block in BLOCKS.known().items()
        if block.made_by is not None
    }


def _make(letter: str, config: Any) -> Block:
    block = BLOCKS[letter].resolve()(config, getattr(config, "blocks", {}).get(letter))
    if not isinstance(block, Block):
        raise UserError(
            f"the build function of block '{letter}' returned a {type(block).__name__}: it must return a "
            "longspan.Block"
        )
    block.from_plugin = True  # it keeps the initial weights that its own code has set
    return block
