"""Files of one JSON object per line that a resumed run goes on with where its checkpoint left them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Journal:
    """A file that only grows, except when a run goes back to an earlier checkpoint."""

    def __init__(self, path: Path, length: int = 0) -> None:
        """Open the file and keep the whole lines among its first `length` bytes.

        A crash of the machine may have left fewer bytes than that, with half a line at their end.
        """
        self._file = path.open("ab")
        self._file.truncate(path.read_bytes()[:length].rfind(b"\n") + 1)

    def write(self, line: Mapping[str, Any]) -> None:
        """Add one line, whole: it is in the hands of the operating system when this returns."""
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()

    def settle(self) -> int:
        """Put everything on the disk; the length so far."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()
