"""Bytes with the token numbers of the originals.

The originals wrote enwik8 as decimal numbers and text8 as letters with `_` for the blank, and read that text
as words. The result is a renumbering of bytes, which is done here with `bytes.translate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from longspan.data.tokenizers.interface import Ids, Tokenizer, lacking
from longspan.data.tokenizers.vocabulary import EOS

NEWLINE = b"\n"


class SymbolTokenizer(Tokenizer):
    """Token i is the byte `symbols[i]`; a newline is `<eos>`, or left out if it is not a symbol."""

    form = "symbols"

    def __init__(self, kind: str, symbols: bytes, *, letters: bool) -> None:
        self.kind = kind
        self.symbols = symbols
        self.letters = letters
        self._table = bytes(max(symbols.find(byte), 0) for byte in range(256))
        self._dropped = b"" if NEWLINE in symbols else NEWLINE

    @property
    def vocabulary_size(self) -> int:
        return len(self.symbols)

    @property
    def names(self) -> list[str]:
        """The originals' name of each token."""
        return [_letter(byte) if self.letters else _number(byte) for byte in self.symbols]

    def encode(self, text: str) -> Ids:
        return self._encode(text.encode("utf-8", "surrogateescape"))

    def encode_split(self, chunks: Iterable[bytes]) -> Iterator[Ids]:
        newlines = NEWLINE in self.symbols
        return map(self._encode, as_read(chunks, letters=self.letters, newlines=newlines))

    def pieces(self) -> list[bytes]:
        return [bytes([byte]) for byte in self.symbols]

    def settings(self) -> dict[str, Any]:
        return {"letters": self.letters, "bytes": list(self.symbols), "names": self.names}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], folder: Path) -> SymbolTokenizer:
        return cls(settings["kind"], bytes(settings["bytes"]), letters=settings["letters"])

    def _encode(self, data: bytes) -> Ids:
        missing = data.translate(None, delete=self.symbols + self._dropped)
        if missing:
            raise lacking("bytes", (repr(bytes([byte]))[2:-1] for byte in missing))
        return np.frombuffer(data.translate(self._table, delete=self._dropped), dtype=np.uint8)


def as_read(chunks: Iterable[bytes], *, letters: bool, newlines: bool) -> Iterator[bytes]:
    """The bytes of a split as the originals read them.

    Letters lose blanks at both ends. With `newlines` every line ends with a newline, also the last one;
    without, no line does.
    """
    last = NEWLINE
    for chunk in _stripped(chunks) if letters else chunks:
        if chunk:
            yield chunk if newlines else chunk.replace(NEWLINE, b"")
            last = chunk[-1:]
    if newlines and last != NEWLINE:
        yield NEWLINE


def _stripped(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """`bytes.strip` for a stream: blanks are kept until something follows them."""
    begun, held = False, b""
    for chunk in chunks:
        chunk = held + chunk if begun else chunk.lstrip()
        body = chunk.rstrip()
        held = chunk[len(body) :]
        begun = begun or bool(body)
        yield body


def _number(byte: int) -> str:
    return EOS if byte == NEWLINE[0] else str(byte)


def _letter(byte: int) -> str:
    return {NEWLINE[0]: EOS, ord(" "): "_"}.get(byte, chr(byte))
