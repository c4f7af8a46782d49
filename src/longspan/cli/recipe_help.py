"""The end of the help of commands that train: all options of recipes, or those of one recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from longspan import recipes
from longspan.config import RunConfig
from longspan.config.reference import Documented, documented, of_config
from longspan.config.schema import read


def recipe_help(words: Sequence[str]) -> str:
    """`words` are those of the command: with a recipe among them, its architecture and values are shown."""
    name = next((word for word in words if word.endswith(".toml") or word in recipes.names()), None)
    if name is None:
        title = "options of a recipe ('RECIPE --help' lists those of one recipe, with its values):"
        return "\n".join([title, *_lines(documented(RunConfig), "default")])
    config = read(RunConfig, recipes.load(name))
    title = f"options of {name}, of the architecture {config.architecture}, with its values:"
    return "\n".join([title, *_lines(of_config(config), "here")])


def _lines(options: Iterator[Documented], meaning: str) -> Iterator[str]:
    for option in options:
        name = option.name.replace("_", "-")
        if "." in name:
            value = "" if option.default in ("none", "required") else f"; {meaning}: {option.default}"
            yield f"  --{name}\n      {option.help} ({option.type}{value})"
