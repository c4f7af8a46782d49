"""Dotted options: `--model.num-layers 4` or `--model.num-layers=4` changes one value of a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from longspan.config.schema import override
from longspan.errors import UserError


def split_overrides(words: Sequence[str]) -> list[tuple[str, str]]:
    """Names and values from the words of a command line."""
    pairs: list[tuple[str, str]] = []
    waiting = iter(words)
    for word in waiting:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or len(name) == 2:
            raise UserError(f"'{word}' is not an option: options look like --model.num-layers 4")
        if not equals:
            following = next(waiting, None)
            if following is None or following.startswith("--"):
                raise UserError(f"'{word}' needs a value, such as {word} VALUE")
            value = following
        pairs.append((name[2:], value))
    return pairs


def apply(table: dict[str, Any], overrides: Iterable[tuple[str, str]]) -> None:
    """Set the values in a recipe's table; `schema.read` then names the keys that do not exist."""
    for name, value in overrides:
        override(table, name, value)
