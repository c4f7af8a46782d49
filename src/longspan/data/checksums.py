"""What was once computed from a whole file, kept until the file changes.

A file counts as changed if its size, its times or its inode differ, or the bytes of a few samples. One of the
times is that of the inode: unlike the time of the content, no program can set it back.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from longspan.home import home

_SAMPLES, _SAMPLE_BYTES = 16, 4096
_CHUNK_BYTES = 4 << 20


def stamp(path: Path) -> list[Any]:
    """What changes if the file changes."""
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        step = max(_SAMPLE_BYTES, (status.st_size - _SAMPLE_BYTES) // (_SAMPLES - 1))
        for start in range(0, status.st_size, step):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, digest.hexdigest()]


def remembered(path: Path, what: str, compute: Callable[[], Any]) -> Any:
    """`compute()`, a JSON value that depends on the file, under the name `what`: once per change."""
    entry, before = _entry(path, what), stamp(path)
    try:
        known = json.loads(entry.read_text(encoding="utf-8"))
        if known["stamp"] == before:
            return known["value"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    value = compute()
    _store(entry, before, value)
    return value


def remember(path: Path, what: str, value: Any) -> None:
    """Store what `remembered` would compute: for a file that was just written."""
    _store(_entry(path, what), stamp(path), value)


def forget() -> None:
    """Everything is computed again when it is next needed."""
    shutil.rmtree(_folder(), ignore_errors=True)


def crc32(path: Path) -> int:
    """The CRC-32 of a file."""
    crc = 0
    for chunk in chunks(path):
        crc = zlib.crc32(chunk, crc)
    return crc


def chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _entry(path: Path, what: str) -> Path:
    name = json.dumps([str(path.absolute()), what]).encode()
    return _folder() / f"{hashlib.blake2b(name, digest_size=8).hexdigest()}.json"


def _store(entry: Path, stamped: list[Any], value: Any) -> None:
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        # Need not be atomic: what is half written is no JSON, and is computed again.
        entry.write_text(json.dumps({"stamp": stamped, "value": value}) + "\n", encoding="utf-8")
    except OSError:  # a read-only or full disk: it is computed again the next time
        pass


def _folder() -> Path:
    return home() / "checked"
