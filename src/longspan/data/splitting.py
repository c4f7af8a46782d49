"""Splitting a corpus into train, valid and test: 90, 5 and 5 percent, without overlap."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from longspan.data.corpus import SPLITS, Piece
from longspan.errors import UserError

TRAIN_PERCENT, VALID_PERCENT = 90, 5
_LINE_SEARCH_BYTES = 64 << 10


def by_file(folder: Path, files: Mapping[Path, Path]) -> dict[str, tuple[Piece, ...]]:
    """Each file goes to one split, decided by a hash of its path in the folder.

    `files` has the text of each file: the file itself, or a copy that was unpacked.

    So a file keeps its split when others are added or removed. If there are too few files for three splits,
    they are split by position, as one long file.
    """
    splits: dict[str, list[Piece]] = {split: [] for split in SPLITS}
    for path, text in files.items():
        splits[_split_of(path.relative_to(folder).as_posix())].append(Piece.whole(text))
    if any(sum(piece.stop for piece in pieces) == 0 for pieces in splits.values()):
        return by_position(str(folder), [Piece.whole(text) for text in files.values()])
    return {split: tuple(pieces) for split, pieces in splits.items()}


def by_position(name: str, pieces: Sequence[Piece]) -> dict[str, tuple[Piece, ...]]:
    """The first 90 percent of the bytes are for training, the rest is held out.

    A cut moves forward to the next end of a line if one is near, else to the next character.
    """
    total = sum(piece.stop - piece.start for piece in pieces)
    valid_at = total * TRAIN_PERCENT // 100
    test_at = total * (TRAIN_PERCENT + VALID_PERCENT) // 100
    first = _good_cut(pieces, valid_at, limit=test_at)
    second = _good_cut(pieces, test_at, limit=total)
    splits = {
        "train": _between(pieces, 0, first),
        "valid": _between(pieces, first, second),
        "test": _between(pieces, second, total),
    }
    if not all(splits.values()):
        raise UserError(f"{name} has only {total} bytes: too little text to split into train, valid and test")
    return splits


def _split_of(relative_path: str) -> str:
    digest = hashlib.blake2b(relative_path.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    percent = int.from_bytes(digest, "big") % 100
    if percent < TRAIN_PERCENT:
        return "train"
    return "valid" if percent < TRAIN_PERCENT + VALID_PERCENT else "test"


def _good_cut(pieces: Sequence[Piece], at: int, limit: int) -> int:
    """The first offset in (at, limit) after a newline, or at the beginning of a character."""
    window = _bytes_at(pieces, at, min(limit - at - 1, _LINE_SEARCH_BYTES))
    newline = window.find(b"\n")
    if newline >= 0:
        return at + newline + 1
    beginnings = (i for i, byte in enumerate(window) if byte & 0xC0 != 0x80)  # not inside a UTF-8 character
    return at + next(beginnings, 0)


def _bytes_at(pieces: Sequence[Piece], start: int, length: int) -> bytes:
    found = b""
    for piece in _between(pieces, start, start + length):
        with piece.path.open("rb") as file:
            file.seek(piece.start)
            found += file.read(piece.stop - piece.start)
    return found


def _between(pieces: Sequence[Piece], start: int, stop: int) -> tuple[Piece, ...]:
    """The part of a sequence of pieces between two offsets."""
    inside = []
    begin = 0
    for piece in pieces:
        end = begin + piece.stop - piece.start
        low, high = max(begin, start), min(end, stop)
        if low < high:
            inside.append(Piece(piece.path, piece.start + low - begin, piece.start + high - begin))
        begin = end
    return tuple(inside)
