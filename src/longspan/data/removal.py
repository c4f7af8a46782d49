"""Removes what Longspan keeps in its cache folder: names, downloads and token files. Texts of users stay."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from longspan.data import corpora, named_paths
from longspan.errors import UserError, nearest
from longspan.files import locked, whole_file
from longspan.home import home

# Caches: made from texts, and made again when they are needed.
_MADE_AGAIN = ("tokens", "checked", "content", "unpacked", "extracted")


def remove(name: str) -> tuple[list[Path], int]:
    """Remove an added name, or the files of a downloaded corpus, and token files made from it.

    Returns the paths of what was removed, and their bytes.
    """
    added = named_paths.registered()
    if name not in added and name not in corpora.ARCHIVES:
        hint = nearest(name, [*added, *corpora.ARCHIVES])
        raise UserError(
            f"'{name}' is not a corpus that was added or downloaded{hint} ('longspan data list' lists them)"
        )
    found = _token_files(name)
    if name in corpora.ARCHIVES:
        found += [corpora.folder_of(name), home() / "downloads" / corpora.ARCHIVES[name].name]
    else:
        _forget(name)
    return _delete(found)


def clean(*, downloads: bool = False, stdin: bool = False) -> tuple[list[Path], int]:
    """Remove all token files and other caches.

    With `downloads` also all corpora that were downloaded, with `stdin` also texts from standard input.
    """
    names = [*_MADE_AGAIN]
    if downloads:
        names += ["corpora", "downloads"]
    if stdin:
        names.append("stdin")
    return _delete([home() / name for name in names])


def _token_files(name: str) -> list[Path]:
    folder, pattern = home() / "tokens", re.compile(rf"{re.escape(name[:40])}-[0-9a-f]{{16}}")
    return [path for path in sorted(folder.glob("*")) if pattern.fullmatch(path.name)]


def _forget(name: str) -> None:
    source = home() / "corpora.json"
    with locked(source):
        entries = json.loads(source.read_text(encoding="utf-8"))
        entries.pop(name, None)
        with whole_file(source) as partial:
            partial.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def _delete(paths: list[Path]) -> tuple[list[Path], int]:
    """A link is removed, not what it leads to."""
    there = [path for path in paths if path.is_symlink() or path.exists()]
    size = sum(map(_size, there))
    for path in there:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return there, size


def _size(path: Path) -> int:
    below = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return sum(entry.lstat().st_size for entry in below if not entry.is_dir())
