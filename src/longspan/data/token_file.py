"""The tokens of a split on disk: memory-mapped arrays of the smallest unsigned integers that fit.

A large split is several files of `SHARD_BYTES`: `train.tokens`, `train.1.tokens`, `train.2.tokens` ...
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from longspan.data.checksums import chunks as file_chunks
from longspan.data.checksums import remember, remembered
from longspan.data.sharded_tokens import ShardedTokens
from longspan.data.tokenizers import id_type
from longspan.data.tokenizers.interface import Ids
from longspan.errors import UserError

SHARD_BYTES = 1 << 32  # of a file; a split with more has several
# White space becomes a blank, everything else an x: a word begins wherever " x" is.
_BLANKS_AND_OTHERS = bytes(b" x"[not bytes([byte]).isspace()] for byte in range(256))


@dataclass(frozen=True)
class TokenFile:
    """The tokens of a split and the size of the raw text."""

    path: Path  # of the first file
    dtype: str
    num_tokens: int
    num_bytes: int  # of the raw text, independent of the tokenizer
    num_characters: int  # code points of the raw text: bytes that begin one
    num_words: int  # of the raw text: what whitespace separates, and the ends of lines
    crc32: int  # of all tokens
    shards: tuple[tuple[int, int], ...] = ()  # tokens and CRC-32 of each file, if there are several
    highest: tuple[int, ...] = field(default=(), compare=False)  # token of each file; only when just written

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", tuple((size, crc) for size, crc in self.shards))  # JSON has lists

    def __len__(self) -> int:
        return self.num_tokens

    @cached_property
    def tokens(self) -> npt.NDArray[Any]:
        """A memory map, or `ShardedTokens`, which has the slices of an array."""
        maps = [np.memmap(path, dtype=self.dtype, mode="r") for path, _, _ in self._files()]
        return maps[0] if len(maps) == 1 else cast("npt.NDArray[Any]", ShardedTokens(maps))

    def is_complete(self) -> bool:
        """Whether all files have their full size and are not empty; `verify` reads every byte."""
        size = np.dtype(self.dtype).itemsize
        return all(
            path.is_file() and path.stat().st_size == size * tokens > 0 for path, tokens, _ in self._files()
        )

    def check(self, vocabulary_size: int) -> None:
        """As `verify`, and that every token is in the vocabulary; a file is read once per change."""
        for path, _, expected in self._files():
            crc, highest = remembered(path, self._what, partial(self._read_all, path))
            if crc != expected:
                raise self._damaged(path, "is damaged")
            if highest >= vocabulary_size:
                raise self._damaged(
                    path, f"has the token {highest}, but the vocabulary is 0 to {vocabulary_size - 1}"
                )

    def remember(self) -> None:
        """Files that were just written need not be read to be checked."""
        for (path, _, crc), highest in zip(self._files(), self.highest, strict=True):
            remember(path, self._what, [crc, highest])

    def verify(self) -> None:
        """Compare every byte with the checksums from when the files were written."""
        for path, _, crc in self._files():
            if self._read_all(path)[0] != crc:
                raise self._damaged(path, "is damaged")

    def facts(self) -> dict[str, Any]:
        """Everything that is stored, as JSON."""
        facts = asdict(self)
        del facts["path"], facts["highest"]
        if not self.shards:
            del facts["shards"]
        return facts

    def _files(self) -> list[tuple[Path, int, int]]:
        """Path, tokens and CRC-32 of every file."""
        shards = self.shards or ((self.num_tokens, self.crc32),)
        return [(shard_path(self.path, number), *shard) for number, shard in enumerate(shards)]

    @property
    def _what(self) -> str:
        return f"tokens {self.dtype}"

    def _read_all(self, path: Path) -> tuple[int, int]:
        """The CRC-32 and the highest token of a file. It is not mapped: that would count as memory."""
        crc = highest = 0
        for data in file_chunks(path):
            crc = zlib.crc32(data, crc)
            highest = max(highest, int(np.frombuffer(data, dtype=self.dtype).max()))
        return crc, highest

    def _damaged(self, path: Path, what: str) -> UserError:
        return UserError(f"{path} {what}: delete the folder {path.parent} and prepare it again")


class Encoder(Protocol):
    """The part of a tokenizer that makes token files."""

    @property
    def vocabulary_size(self) -> int: ...

    def encode_split(self, chunks: Iterable[bytes]) -> Iterator[Ids]: ...


def write_token_file(path: Path, tokenizer: Encoder, chunks: Iterable[bytes]) -> TokenFile:
    """Tokenize a stream of raw text into `path` and further files, chunk by chunk."""
    dtype = id_type(tokenizer.vocabulary_size)
    raw = Counted(chunks)
    with _Writer(path, SHARD_BYTES // dtype.itemsize) as writer:
        for ids in tokenizer.encode_split(raw):
            writer.write(np.ascontiguousarray(ids, dtype=dtype))
    shards = writer.shards
    return TokenFile(
        path,
        dtype.name,
        sum(shard.num_tokens for shard in shards),
        raw.num_bytes,
        raw.num_characters,
        raw.num_words,
        writer.crc,
        tuple((shard.num_tokens, shard.crc) for shard in shards) if len(shards) > 1 else (),
        tuple(shard.highest for shard in shards),
    )


def shard_path(path: Path, number: int) -> Path:
    """`train.tokens`, `train.1.tokens` ..."""
    return path if number == 0 else path.with_suffix(f".{number}{path.suffix}")


@dataclass
class _Shard:
    num_tokens: int = 0
    crc: int = 0
    highest: int = 0


class _Writer:
    """Writes tokens into files of at most `most` tokens each."""

    def __init__(self, path: Path, most: int) -> None:
        self._path, self._most = path, most
        self._open_file = ExitStack()
        self.shards: list[_Shard] = []
        self.crc = 0  # of all tokens

    def __enter__(self) -> _Writer:
        self._begin()
        return self

    def __exit__(self, *problem: object) -> None:
        self._open_file.close()

    def write(self, ids: Ids) -> None:
        while len(ids):
            if self.shards[-1].num_tokens == self._most:
                self._begin()
            shard = self.shards[-1]
            part = ids[: self._most - shard.num_tokens]
            self._file.write(part.data)
            shard.num_tokens += len(part)
            shard.crc = zlib.crc32(part.data, shard.crc)
            shard.highest = max(shard.highest, int(part.max()))
            ids = ids[len(part) :]
            self.crc = zlib.crc32(part.data, self.crc)

    def _begin(self) -> None:
        self._open_file.close()
        path = shard_path(self._path, len(self.shards))
        self._file: IO[bytes] = self._open_file.enter_context(path.open("xb"))
        self.shards.append(_Shard())


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
