"""A text of any size as a stream of tokens, from a file or from standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.errors import UserError
from longspan.progress import Task

if TYPE_CHECKING:
    from longspan.data import Tokenizer

CHUNK_BYTES = 1 << 16  # read at a time


def check_file(name: str) -> None:
    """Raise before a model is loaded if the text cannot be read."""
    if name == "-":
        return
    path = Path(name)
    if not path.exists():
        raise UserError(f"there is no file {path}")
    if path.is_dir():
        raise UserError(f"{path} is a folder: give a text file, or - for standard input")
    with path.open("rb"):
        pass


class TextInput:
    """The tokens of a text; `bytes` counts what was read so far."""

    def __init__(self, name: str, tokenizer: Tokenizer, progress: Task) -> None:
        self.name = "standard input" if name == "-" else name
        self.bytes = 0
        self._tokens = 0  # of these bytes
        self._source, self._tokenizer, self._progress = name, tokenizer, progress

    def chunks(self) -> Iterator[Any]:
        """The tokens, some at a time, as training would read the text."""
        for ids in self._tokenizer.encode_split(self._bytes()):
            self._tokens += len(ids)
            yield ids

    def tell(self, tokens: int) -> None:
        """Show the progress after so many tokens, as bytes."""
        self._progress(self.bytes * tokens // max(self._tokens, 1))

    def _bytes(self) -> Iterator[bytes]:
        if self._source == "-":
            yield from self._counted(getattr(sys.stdin, "buffer", sys.stdin))
            return
        with open(self._source, "rb") as file:
            self._progress(0, os.fstat(file.fileno()).st_size)
            yield from self._counted(file)

    def _counted(self, file: Any) -> Iterator[bytes]:
        while chunk := file.read(CHUNK_BYTES):
            self.bytes += len(chunk)
            yield chunk
