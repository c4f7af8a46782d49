"""Dotted options: `--model.num-layers 4` or `--model.num-layers=4` changes one value of a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from longspan import recipes
from longspan.config import RunConfig
from longspan.config.schema import override, read
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


def changed(table: dict[str, Any], overrides: Iterable[tuple[str, str]], recipe: str) -> RunConfig:
    """What the table of `recipe` says once these values are set in it."""
    overrides, before = list(overrides), _architecture(table)
    apply(table, overrides)
    try:
        return read(RunConfig, table)
    except UserError as problem:
        now, complaint = _architecture(table), str(problem)
        typed = any(f"'{name.replace('-', '_')}'" in complaint for name, _ in overrides)
        if now == before or typed or not complaint.startswith("unknown key 'model."):
            raise
        raise UserError(_other_architecture(recipe, before, now)) from None


def _architecture(table: dict[str, Any]) -> str:
    model = table.get("model")
    default = RunConfig().architecture
    return str(model.get("architecture", default)) if isinstance(model, dict) else default


def _other_architecture(recipe: str, before: str, now: str) -> str:
    """The keys that are unknown now are the recipe's: nobody has typed them."""
    fitting = [name for name in recipes.names() if _architecture(recipes.load(name)) == now]
    return (
        f"the options of {recipe} are those of {before}, and {now} has others: begin with a recipe of {now} "
        f"({', '.join(fitting)}), or with a TOML file of your own"
    )
