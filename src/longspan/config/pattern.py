"""A stack of blocks as a word: one letter per block, first block first."""

from __future__ import annotations

from longspan.config.formatting import shown

LETTERS = {"s": "attention", "l": "long attention", "f": "feed-forward", "i": "identity"}


def check_pattern(pattern: str, name: str = "pattern", letters: str = "".join(LETTERS)) -> None:
    """A `ValueError` unless every letter is one of those given and there is at least one."""
    known = ", ".join(f"{letter} ({LETTERS[letter]})" for letter in letters)
    if not pattern:
        raise ValueError(f"{name} has no blocks: give one letter for each, of {known}")
    unknown = next((letter for letter in pattern if letter not in letters), None)
    if unknown is not None:
        raise ValueError(
            f"{name} {shown(pattern)} has an unknown letter {shown(unknown)}: the letters are {known}"
        )
