"""A stack of blocks as a word: one letter per block, in the order of reading."""

from __future__ import annotations

from longspan.config.words import shown

LETTERS = {"s": "attention", "f": "feed-forward", "i": "identity"}


def check_pattern(pattern: str, name: str = "pattern") -> None:
    """A `ValueError` unless every letter stands for a block and there is at least one."""
    known = ", ".join(f"{letter} ({meaning})" for letter, meaning in LETTERS.items())
    if not pattern:
        raise ValueError(f"{name} has no blocks: give one letter for each, of {known}")
    unknown = next((letter for letter in pattern if letter not in LETTERS), None)
    if unknown is not None:
        raise ValueError(
            f"{name} {shown(pattern)} has an unknown letter {shown(unknown)}: the letters are {known}"
        )
