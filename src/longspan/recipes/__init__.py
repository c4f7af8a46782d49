"""Recipes: one TOML file per result that we or the papers claim."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from longspan.config.schema import parse_toml
from longspan.errors import UserError, nearest

DEFAULT = "quickstart"


def names() -> list[str]:
    """The recipes that come with the package."""
    folder = resources.files(__name__)
    return sorted(entry.name[: -len(".toml")] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load(name_or_path: str) -> dict[str, Any]:
    """The table of a recipe: a name from `names()` or the path of a TOML file."""
    if name_or_path in names():
        text = (resources.files(__name__) / f"{name_or_path}.toml").read_text(encoding="utf-8")
        return parse_toml(text, f"recipe {name_or_path}")
    path = Path(name_or_path)
    if path.suffix == ".toml":
        if not path.is_file():
            raise UserError(f"there is no recipe file {path}")
        return parse_toml(path.read_text(encoding="utf-8"), str(path))
    hint = nearest(name_or_path, names())
    raise UserError(f"unknown recipe '{name_or_path}'{hint} ('longspan recipes' lists them)")
