"""Names that users give to their own files and folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from longspan.errors import UserError
from longspan.files import locked, whole_file
from longspan.home import home


class _Entry(NamedTuple):
    path: Path
    follow_links: bool = False


def registered() -> dict[str, Path]:
    """Every added name and its path."""
    return {name: entry.path for name, entry in _entries().items()}


def follows_links(name: str) -> bool:
    """Whether links that lead out of the folder with this name are allowed."""
    return _entries()[name].follow_links


def register(name: str, path: Path, *, follow_links: bool = False) -> None:
    """Store a name. A name that exists cannot be given another path."""
    with locked(_path()):
        entries = _entries()
        if name in entries and entries[name].path != path:
            raise UserError(f"'{name}' is already used for {entries[name].path}: choose another name")
        entries[name] = _Entry(path, follow_links)
        stored = {name: _as_stored(entry) for name, entry in entries.items()}
        with whole_file(_path()) as partial:
            partial.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def _entries() -> dict[str, _Entry]:
    source = _path()
    try:
        stored = json.loads(source.read_text(encoding="utf-8"))
        return {name: _from_stored(value) for name, value in stored.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
        raise UserError(f"{source} is damaged: correct it, or delete it and add your corpora again") from None


def _as_stored(entry: _Entry) -> str | dict[str, str | bool]:
    return {"path": str(entry.path), "follow_links": True} if entry.follow_links else str(entry.path)


def _from_stored(value: str | dict[str, str]) -> _Entry:
    return _Entry(Path(value)) if isinstance(value, str) else _Entry(Path(value["path"]), True)


def _path() -> Path:
    return home() / "corpora.json"
