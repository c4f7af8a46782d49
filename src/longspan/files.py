"""Writing files so that a reader never sees half of one, whatever kills the writer."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends well it takes the name `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        _to_disk(partial)
        os.replace(partial, path)
        _to_disk(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; when the block ends well it takes the name `path`.

    If another process put a folder there in the meantime, theirs stays and ours is dropped.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
    try:
        yield partial
        for entry in partial.rglob("*"):
            _to_disk(entry)
        _to_disk(partial)
        try:
            os.replace(partial, path)
        except OSError:
            if not path.is_dir():
                raise
        _to_disk(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
