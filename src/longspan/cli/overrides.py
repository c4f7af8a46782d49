"""Dotted options: `--model.num-layers 4` or `--model.num-layers=4` changes one value of a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

from longspan import recipes
from longspan.config import RunConfig
from longspan.config.schema import override, read
from longspan.errors import UsageError, UserError


def split_overrides(words: Sequence[str]) -> list[tuple[str, str]]:
    """Names and values from command-line arguments."""
    pairs: list[tuple[str, str]] = []
    waiting = iter(words)
    for word in waiting:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or len(name) == 2:
            raise UsageError(f"'{word}' is not an option: options look like --model.num-layers 4")
        if not equals:
            following = next(waiting, None)
            if following is None or following.startswith("--"):
                raise UsageError(f"'{word}' needs a value, such as {word} VALUE")
            value = following
        if name.replace("-", "_") in {f"__{known.replace('-', '_')}" for known, _ in pairs}:
            raise UsageError(f"{name} is given twice: give it once")
        pairs.append((name[2:], value))
    return pairs


def apply(table: dict[str, Any], overrides: Iterable[tuple[str, str]]) -> None:
    """Set the values in a recipe's table; `schema.read` then reports unknown keys."""
    for name, value in overrides:
        override(table, name, value)


def changed(table: dict[str, Any], overrides: Iterable[tuple[str, str]], recipe: str) -> RunConfig:
    """The configuration of `recipe` after setting these values in its table.

    A mistake is one of usage if it is in an option that was typed, or if the recipe alone has none.
    """
    overrides, before = list(overrides), _architecture(table)
    alone = deepcopy(table)
    try:
        apply(table, overrides)
        return read(RunConfig, table)
    except UserError as problem:
        now, complaint = _architecture(table), str(problem)
        typed = any(f"'{name.replace('-', '_')}'" in complaint for name, _ in overrides)
        if now != before and not typed and complaint.startswith("unknown key 'model."):
            complaint = _other_architecture(recipe, before, now)
        raise (UsageError if typed or _is_valid(alone) else UserError)(complaint) from None


def _is_valid(table: dict[str, Any]) -> bool:
    try:
        read(RunConfig, table)
    except UserError:
        return False
    return True


def _architecture(table: dict[str, Any]) -> str:
    model = table.get("model")
    default = RunConfig().architecture
    return str(model.get("architecture", default)) if isinstance(model, dict) else default


def _other_architecture(recipe: str, before: str, now: str) -> str:
    """The unknown keys come from the recipe, not from the user."""
    fitting = [name for name in recipes.names() if _architecture(recipes.load(name)) == now]
    return (
        f"{recipe} has options of {before}, which {now} does not know: start from a recipe of {now} "
        f"({', '.join(fitting)}), or from your own TOML file"
    )
