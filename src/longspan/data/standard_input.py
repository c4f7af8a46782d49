"""Text from standard input. It is stored in the cache folder, so that a run can be resumed."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from longspan.errors import UserError
from longspan.home import home

NAME = "-"

_stored: Path | None = None  # it can be read only once


def stored(progress: Callable[[str], None] = lambda line: None, *, json_lines: bool = False) -> Path:
    """The file with the text of standard input; the same text has the same file."""
    global _stored
    if _stored is None:
        _stored = _store(progress, ".jsonl" if json_lines else ".txt")
    return _stored


def _store(progress: Callable[[str], None], suffix: str) -> Path:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("several processes cannot read one standard input: store the text in a file")
    if sys.stdin is None or sys.stdin.closed:
        raise UserError("standard input is closed: there is no text to read")
    if sys.stdin.isatty():
        progress("reading the text from standard input: end it with Ctrl-D")
    folder = home() / "stdin"
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=folder)
    try:
        digest = hashlib.blake2b(digest_size=8)
        with os.fdopen(descriptor, "wb") as file:
            while chunk := sys.stdin.buffer.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
            if file.tell() == 0:
                raise UserError("standard input is empty: there is no text to read")
            file.flush()
            os.fsync(file.fileno())
        path = folder / f"stdin-{digest.hexdigest()}{suffix}"
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    return path
