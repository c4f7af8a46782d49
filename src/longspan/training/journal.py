"""JSON Lines files that a resumed run continues from the length they had at its checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspan.json_text import to_json
from longspan.runs.no_links import open_to_append


class Journal:
    """An append-only file, truncated only when a run is resumed from an earlier checkpoint."""

    def __init__(self, path: Path, length: int = 0) -> None:
        """Open the file and keep the complete lines within its first `length` bytes.

        A crash of the machine may have left fewer bytes, and the last line incomplete.
        """
        self._file = open_to_append(path)
        self._file.truncate(path.read_bytes()[:length].rfind(b"\n") + 1)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line and flush it to the operating system."""
        self._file.write(to_json(line).encode() + b"\n")
        self._file.flush()

    def sync(self) -> int:
        """Flush to disk (fsync) and return the length in bytes."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()
