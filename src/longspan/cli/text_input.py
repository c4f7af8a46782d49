"""A text of any size as a stream of tokens, from a file or from standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.cli.console import say
from longspan.errors import UserError
from longspan.progress import every_tenth

if TYPE_CHECKING:
    from longspan.data import Tokenizer

CHUNK_BYTES = 1 << 16  # read at a time
_MANY_BYTES = 1 << 20  # from this size on progress is shown


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

    def __init__(self, name: str, tokenizer: Tokenizer, *, quiet: bool = False) -> None:
        self.name = "standard input" if name == "-" else name
        self.bytes = 0
        self._source, self._tokenizer, self._quiet = name, tokenizer, quiet

    def chunks(self) -> Iterator[Any]:
        """The tokens, some at a time, as training would read the text."""
        return iter(self._tokenizer.encode_split(self._bytes()))

    def _bytes(self) -> Iterator[bytes]:
        if self._source == "-":
            yield from self._counted(getattr(sys.stdin, "buffer", sys.stdin), 0)
            return
        with open(self._source, "rb") as file:
            yield from self._counted(file, Path(self._source).stat().st_size)

    def _counted(self, file: Any, total: int) -> Iterator[bytes]:
        progress = every_tenth(lambda done, total: say(f"{self.name}: {done:,} of {total:,} bytes"))
        while chunk := file.read(CHUNK_BYTES):
            self.bytes += len(chunk)
            yield chunk
            if total >= _MANY_BYTES and not self._quiet:
                progress(self.bytes, total)
