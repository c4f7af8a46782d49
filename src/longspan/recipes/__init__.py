"""Recipes: one TOML file per result that we or the papers claim."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from longspan.config.schema import parse_toml
from longspan.errors import UserError, nearest
from longspan.plugins import never_import_from

DEFAULT = "quickstart"


def names() -> list[str]:
    """The recipes that come with the package."""
    folder = resources.files(__name__)
    return sorted(entry.name[: -len(".toml")] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def content(name: str) -> bytes:
    """The TOML file of a recipe from `names()`."""
    if name not in names():
        raise UserError(f"unknown recipe '{name}'{nearest(name, names())} ('longspan recipes' lists them)")
    return (resources.files(__name__) / f"{name}.toml").read_bytes()


def load(name_or_path: str) -> dict[str, Any]:
    """The table of a recipe: a name from `names()` or the path of a TOML file."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        if not path.is_file():
            raise UserError(f"there is no recipe file {path}")
        if (path.parent / "config.toml").is_file() and (path.parent / "checkpoints").is_dir():
            never_import_from(path.parent)  # a run folder: config.toml, or what a search found
        return parse_toml(path.read_bytes(), str(path))
    return parse_toml(content(name_or_path), f"recipe {name_or_path}")
