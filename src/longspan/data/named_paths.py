"""Names that users give to their own files and folders."""

from __future__ import annotations

import json
from pathlib import Path

from longspan.errors import UserError
from longspan.files import whole_file
from longspan.home import home


def registered() -> dict[str, Path]:
    """Every added name and its path."""
    path = _path()
    try:
        return {name: Path(place) for name, place in json.loads(path.read_text(encoding="utf-8")).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise UserError(f"{path} is damaged: correct it, or delete it and add your corpora again") from None


def register(name: str, place: Path) -> None:
    """Store a name. A name that exists cannot be given another path."""
    known = registered()
    if name in known and known[name] != place:
        raise UserError(f"'{name}' is already used for {known[name]}: choose another name")
    with whole_file(_path()) as partial:
        entries = {entry: str(path) for entry, path in {**known, name: place}.items()}
        partial.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def _path() -> Path:
    return home() / "corpora.json"
