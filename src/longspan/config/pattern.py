"""A stack of blocks as a word: one letter per block, first block first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspan.config.formatting import shown
from longspan.config.schema import read, sections
from longspan.registry import BLOCKS


def letters(own: str) -> str:
    """The letters of an architecture with their names: its `own` blocks and all that plugins have added."""
    known = (letter for letter, block in BLOCKS.items() if letter in own or block.made_by is not None)
    return ", ".join(f"{letter} ({BLOCKS[letter].name})" for letter in known)


def check_pattern(pattern: str, name: str = "pattern", own: str = "slfi") -> None:
    """A `ValueError` unless there is a letter, and all letters are of `own` blocks or of plugins."""
    if not pattern:
        raise ValueError(f"{name} has no blocks: give one letter for each, of {letters(own)}")
    for letter in pattern:
        if letter not in own and (letter not in BLOCKS or BLOCKS[letter].made_by is None):
            raise ValueError(
                f"{name} {shown(pattern)} has an unknown letter {shown(letter)}: "
                f"the letters are {letters(own)}"
            )


def block_options() -> Any:
    """The field `blocks` of an architecture with a pattern: [model.blocks.LETTER] for blocks of plugins."""
    return sections(BLOCKS, help="options of blocks that plugins have added, by their letters")


def with_defaults(given: Mapping[str, Any], pattern: str) -> dict[str, Any]:
    """The options of all blocks in `pattern`, the defaults where none are given."""
    options = dict(given)
    for letter in pattern:
        config_class = BLOCKS[letter].config_class if letter in BLOCKS else None
        if config_class is not None and letter not in options:
            options[letter] = read(config_class, {}, f"model.blocks.{letter}")
    return options
