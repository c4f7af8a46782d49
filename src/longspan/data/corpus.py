"""A corpus before it is tokenized: three splits, each a sequence of pieces of files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SPLITS = ("train", "valid", "test")
WHOLE = "whole"  # the only split of a file that is scored without splitting it
CHUNK_BYTES = 4 << 20  # read at a time: corpora may be larger than memory

# The format in which the originals stored a corpus: see tokenizers/originals.py; numbers: see data_bin.py.
Form = Literal["bytes", "letters", "words", "numbers"]


@dataclass(frozen=True)
class Piece:
    """The bytes `start` to `stop` of a file."""

    path: Path
    start: int
    stop: int

    @staticmethod
    def whole(path: Path) -> Piece:
        return Piece(path, 0, path.stat().st_size)


@dataclass(frozen=True)
class Corpus:
    """The raw text of `train`, `valid` and `test`.

    The text of a split is its pieces, concatenated. If a file has no final newline and another file follows,
    a newline is added between them.
    """

    name: str
    splits: Mapping[str, tuple[Piece, ...]]
    form: Form = "words"

    def read(self, split: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """The bytes of a split, in chunks."""
        last = b"\n"
        before: Path | None = None
        for piece in self.splits[split]:
            if before not in (None, piece.path) and last != b"\n":
                yield b"\n"
            before = piece.path
            for chunk in _read(piece, chunk_bytes):
                yield chunk
                last = chunk[-1:]

    def size(self, split: str) -> int:
        """Bytes of a split on disk."""
        return sum(piece.stop - piece.start for piece in self.splits[split])


def _read(piece: Piece, chunk_bytes: int) -> Iterator[bytes]:
    with piece.path.open("rb") as file:
        file.seek(piece.start)
        left = piece.stop - piece.start
        while left > 0 and (chunk := file.read(min(chunk_bytes, left))):
            left -= len(chunk)
            yield chunk
