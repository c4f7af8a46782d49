"""The tokens of a split on disk: a memory-mapped array of the smallest unsigned integers that fit."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from longspan.data.checksums import remembered
from longspan.data.tokenizers import Tokenizer, id_type
from longspan.errors import UserError

# White space becomes a blank, everything else an x: a word begins wherever " x" is.
_BLANKS_AND_OTHERS = bytes(b" x"[not bytes([byte]).isspace()] for byte in range(256))


@dataclass(frozen=True)
class TokenFile:
    """The tokens of a split and the size of the raw text."""

    path: Path
    dtype: str
    num_tokens: int
    num_bytes: int  # of the raw text, independent of the tokenizer
    num_characters: int  # code points of the raw text: bytes that begin one
    num_words: int  # of the raw text: what whitespace separates, and the ends of lines
    crc32: int  # of the token file

    def __len__(self) -> int:
        return self.num_tokens

    @cached_property
    def tokens(self) -> np.memmap[Any, np.dtype[Any]]:
        return np.memmap(self.path, dtype=self.dtype, mode="r")

    def is_complete(self) -> bool:
        """Whether the file has its full size and is not empty; `verify` reads every byte."""
        size = self.num_tokens * np.dtype(self.dtype).itemsize
        return self.path.is_file() and self.path.stat().st_size == size > 0

    def check(self, vocabulary_size: int) -> None:
        """As `verify`, and that every token is in the vocabulary; the file is read once per change."""
        crc, highest = remembered(self.path, f"tokens {self.dtype}", self._read_all)
        if crc != self.crc32:
            raise self._damaged("is damaged")
        if highest >= vocabulary_size:
            raise self._damaged(f"has the token {highest}, but the vocabulary is 0 to {vocabulary_size - 1}")

    def verify(self) -> None:
        """Compare every byte with the checksum from when the file was written."""
        if self._read_all()[0] != self.crc32:
            raise self._damaged("is damaged")

    def _read_all(self) -> tuple[int, int]:
        """The CRC-32 and the highest token."""
        crc = highest = 0
        for start in range(0, self.num_tokens, 1 << 22):
            tokens = self.tokens[start : start + (1 << 22)]
            crc = zlib.crc32(tokens.data, crc)
            highest = max(highest, int(tokens.max()))
        return crc, highest

    def _damaged(self, what: str) -> UserError:
        return UserError(f"{self.path} {what}: delete the folder {self.path.parent} and prepare it again")

    def facts(self) -> dict[str, Any]:
        """Everything except the path, as JSON."""
        facts = asdict(self)
        del facts["path"]
        return facts


def write_token_file(path: Path, tokenizer: Tokenizer, chunks: Iterable[bytes]) -> TokenFile:
    """Tokenize a stream of raw text into `path`, chunk by chunk."""
    dtype = id_type(tokenizer.vocabulary_size)
    raw = Counted(chunks)
    num_tokens = crc = 0
    with path.open("xb") as file:
        for ids in tokenizer.encode_split(raw):
            data = np.ascontiguousarray(ids, dtype=dtype)
            file.write(data.data)
            num_tokens += len(data)
            crc = zlib.crc32(data.data, crc)
    return TokenFile(path, dtype.name, num_tokens, raw.num_bytes, raw.num_characters, raw.num_words, crc)


class Counted:
    """A stream of bytes that counts what passed."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = chunks
        self.num_bytes = self.num_characters = self.num_words = 0

    def __iter__(self) -> Iterator[bytes]:
        last = b"\n"
        for chunk in filter(None, self._chunks):
            signed = np.frombuffer(chunk, dtype=np.int8)
            self.num_bytes += len(chunk)
            # 0x80 to 0xBF, the bytes inside a UTF-8 character, are -128 to -65
            self.num_characters += int(np.count_nonzero(signed >= -64))
            self.num_words += (last + chunk).translate(_BLANKS_AND_OTHERS).count(b" x") + chunk.count(b"\n")
            last = chunk[-1:]
            yield chunk
        self.num_words += last != b"\n"  # a last line without a newline counts too
