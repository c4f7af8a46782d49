"""Paths in arguments: `~` is the home folder, also where the shell does not expand it (`--out=~/run`)."""

from __future__ import annotations

import os
from pathlib import Path

from longspan.errors import UserError


def expanded(text: str) -> str:
    """The `type` of an argument that is a path, or a name or a path; empty text stays empty."""
    return os.path.expanduser(text)


def as_path(text: str) -> Path:
    return Path(expanded(text))


def check_writable(path: Path) -> None:
    """Raise before hours of work if a new file cannot be written; missing folders are created later."""
    for folder in path.absolute().parents:
        if folder.exists():
            if not folder.is_dir():
                raise UserError(f"cannot write {path}: {folder} is not a folder")
            if not os.access(folder, os.W_OK | os.X_OK):
                raise UserError(f"cannot write {path}: you may not write to {folder}")
            return


def check_parent(out: Path) -> None:
    """A new folder needs an existing parent, since a missing one is most likely a typing mistake.

    `runs`, where runs go by default, is created.
    """
    parent = out.absolute().parent
    if not parent.is_dir() and parent != Path("runs").absolute():
        raise UserError(f"there is no folder {parent}: create it, or choose an existing one for {out.name}")
