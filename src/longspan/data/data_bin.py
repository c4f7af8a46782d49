"""Folders that fairseq prepared (`fairseq-preprocess`): `dict.txt`, and a `.bin` and an `.idx` of each split.

The `.bin` holds the numbers of all words, sentence after sentence. The `.idx` holds their integer type and
the length of each sentence. The numbers are read as a text of numbers. Sentences need no marks of their own:
fairseq ends each with the number of `</s>`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from longspan.data.corpus import CHUNK_BYTES, Corpus, Piece
from longspan.errors import UserError

DICTIONARY = "dict.txt"
MAGIC, LEGACY_MAGIC = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00"
HEADER = struct.Struct("<QBQ")  # version, type, sentences
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
TRAIN_PERCENT = 90
_SENTENCES = 1 << 20  # that are checked together


@dataclass(frozen=True)
class DataBin(Corpus):
    """Numbers of words, read as text."""

    folder: Path = Path()
    types: Mapping[Path, str] = field(default_factory=dict)  # of the integers in each file

    def read(self, split: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        for piece in self.splits[split]:
            kind = np.dtype(self.types[piece.path])
            numbers = np.memmap(piece.path, dtype=kind, mode="r")
            start, stop = piece.start // kind.itemsize, piece.stop // kind.itemsize
            step = max(1, chunk_bytes // 8)  # a number takes a few characters
            for at in range(start, stop, step):
                chunk = numbers[at : min(at + step, stop)].tolist()
                yield (" ".join(map(str, chunk)) + "\n").encode()


def is_data_bin(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (DICTIONARY, "train.bin", "train.idx"))


def from_folder(folder: Path) -> DataBin:
    """The splits of a folder. One that is missing is a part of train, or half of the other held-out one."""
    found, types = {}, {}
    for split in ("train", "valid", "test"):
        path = folder / f"{split}.bin"
        if path.is_file() and path.with_suffix(".idx").is_file():
            types[path] = _checked(path)
            found[split] = Piece.whole(path)
    sizes = {path: np.dtype(kind).itemsize for path, kind in types.items()}
    if "valid" not in found and "test" not in found:
        percent = TRAIN_PERCENT + (100 - TRAIN_PERCENT) // 2
        before, found["test"] = _cut(found["train"], percent, sizes)
        found["train"], found["valid"] = _cut(before, 100 * TRAIN_PERCENT // percent, sizes)
    elif "test" not in found or "valid" not in found:
        found["valid"], found["test"] = _cut(found.get("valid", found.get("test")), 50, sizes)
    splits = {split: (piece,) for split, piece in found.items()}
    return DataBin(folder.resolve().name, splits, "numbers", folder=folder, types=types)


def symbols(folder: Path) -> list[str]:
    """The words of `dict.txt` by their numbers: fairseq's own four come first."""
    path = folder / DICTIONARY
    words = ["<s>", "<pad>", "</s>", "<unk>"]
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        word, _, count = line.removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not word or not count.isdecimal():
            raise UserError(f"{path} is not a dictionary of fairseq: line {number} has no word and its count")
        words.append(word)
    return words


def _checked(path: Path) -> str:
    """The integer type of a `.bin`, if its `.idx` fits it."""
    index = path.with_suffix(".idx")
    size, begin = index.stat().st_size, len(MAGIC) + HEADER.size
    with index.open("rb") as file:
        content = file.read(begin)
    if content.startswith(LEGACY_MAGIC):
        raise UserError(
            f"{index} has fairseq's older format: use fairseq-preprocess with --dataset-impl mmap"
        )
    damaged = UserError(f"{index} and {path.name} are damaged, or not from fairseq: prepare them again")
    if not content.startswith(MAGIC) or size < begin:
        raise damaged
    version, code, sentences = HEADER.unpack_from(content, len(MAGIC))
    if version != 1 or code not in TYPES or size != begin + 12 * sentences:
        raise damaged
    end = 0  # of the sentences so far, in bytes
    for first in range(0, sentences, _SENTENCES):
        count = min(_SENTENCES, sentences - first)
        lengths = np.fromfile(index, "<i4", count, offset=begin + 4 * first).astype(np.int64)
        starts = np.fromfile(index, "<i8", count, offset=begin + 4 * sentences + 8 * first)
        ends = end + np.cumsum(lengths) * np.dtype(TYPES[code]).itemsize
        if (lengths < 0).any() or starts[0] != end or (starts[1:] != ends[:-1]).any():
            raise damaged
        end = int(ends[-1])
    if end != path.stat().st_size:
        raise damaged
    return TYPES[code]


def _cut(piece: Piece | None, percent: int, sizes: Mapping[Path, int]) -> tuple[Piece, Piece]:
    assert piece is not None
    size = sizes[piece.path]
    middle = piece.start + (piece.stop - piece.start) // size * percent // 100 * size
    return Piece(piece.path, piece.start, middle), Piece(piece.path, middle, piece.stop)
