"""Where the checkpoints of a run lie: the newest at its own path, those before it as `last-1`, `last-2` ...

A checkpoint is a file, or a folder of shards. A folder cannot be replaced in one step, so for a moment its
path is empty; then the checkpoint before it, which has a number, counts.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from longspan.files import remove_folder

SUFFIX = ".safetensors"


def previous(path: Path) -> list[Path]:
    """The checkpoints that were at `path` before and are kept, newest first: `last-1`, `last-2` ..."""
    pattern = re.compile(rf"{re.escape(path.stem)}-(\d+){re.escape(SUFFIX)}")
    found = ((pattern.fullmatch(entry.name), entry) for entry in path.parent.glob(f"{path.stem}-*{SUFFIX}"))
    return [entry for _, entry in sorted((int(match[1]), entry) for match, entry in found if match)]


def numbered(path: Path, last: int) -> list[Path]:
    """`path`, and the names of those before it up to the number `last`."""
    return [path, *(path.with_name(f"{path.stem}-{number}{SUFFIX}") for number in range(1, last + 1))]


def newest(path: Path) -> Path:
    """`path`, or the newest checkpoint before it if a writer was stopped while it put a new one at `path`."""
    return path if os.path.lexists(path) else next(iter(previous(path)), path)


def make_room(path: Path, keep: int, *, for_folder: bool) -> None:
    """Give the checkpoint at `path` and those before it their next numbers; the oldest is removed.

    A file that replaces a file needs no room, so `path` has a checkpoint at any time. Otherwise the one at
    `path` is moved, and is kept under the number 1 until `remove_oldest`, even if only one is to stay.
    """
    moves = for_folder or _is_folder(path)
    last = max(keep - 1, 1) if moves else keep - 1
    for newer, older in reversed([*itertools.pairwise(numbered(path, last))]):
        if not os.path.lexists(newer):
            continue
        remove(older)
        if newer == path and not moves:  # a second name, so that there is a checkpoint at `path` at any time
            try:
                os.link(newer, older)
                continue
            except OSError:  # some file systems have no hard links
                pass
        os.replace(newer, older)


def remove_oldest(path: Path, keep: int) -> None:
    """Of the checkpoints that were written to `path`, leave the newest `keep`."""
    for number, older in enumerate(previous(path), start=1):
        if number >= keep:
            remove(older)


def remove(path: Path) -> None:
    """Remove a checkpoint if it is there: a file, or a folder of shards, which disappears at once."""
    if _is_folder(path):
        remove_folder(path)
    else:
        path.unlink(missing_ok=True)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
