"""The corpus of a race: train, valid and test as files of bytes, written once.

A folder with files for train, valid and test is used as it is. From anything else the first bytes are used,
with the files of a folder joined in the order of their paths, and split 90 / 5 / 5. The test split is limited
to its first mebibyte.

For the part `valid` the second half of valid is written in place of the test, and its first half as valid:
training is the same, and nothing can read the test.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from longspan.errors import UserError
from longspan.files import whole_folder
from longspan.home import home

SPLITS = ("train", "valid", "test")
PARTS = ("test", "valid")
TEST_BYTES = 1 << 20
FILES, BYTES = "*.py", 100_000_000  # unless given
_CHUNK = 1 << 22


def written(
    source: Path, *, pattern: str | None = None, num_bytes: int | None = None, part: str = "test"
) -> Path:
    """A folder with train.txt, valid.txt and test.txt, made from `source` or reused from the cache."""
    own = _own_splits(source)
    if own and (pattern is not None or num_bytes is not None):
        raise UserError(
            f"{source} has files for train, valid and test, which are used as they are: leave out --files "
            "and --bytes"
        )
    files = list(own.values()) or _files(source, pattern or FILES)
    num_bytes = num_bytes or BYTES
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.blake2b(json.dumps([stamps, num_bytes]).encode(), digest_size=8).hexdigest()
    name = f"{source.resolve().name}-{digest}" + ("-valid" if part == "valid" else "")
    folder = home() / "race" / name
    if not folder.exists():
        with whole_folder(folder, first_wins=True) as partial:
            if own:
                _write_own(own, partial)
            else:
                _write_cut(files, num_bytes, partial)
            if part == "valid":
                _halve_valid(partial)
    return folder


def _halve_valid(folder: Path) -> None:
    valid = (folder / "valid.txt").read_bytes()
    half = len(valid) // 2
    if not half:
        raise UserError(f"{len(valid)} bytes of valid are too few for --part valid: use more text")
    (folder / "valid.txt").write_bytes(valid[:half])
    (folder / "test.txt").write_bytes(valid[half:][:TEST_BYTES])


def _own_splits(source: Path) -> dict[str, Path]:
    """Files such as train.txt, wiki.train.tokens or train.txt.xz, if all three splits exist."""
    if not source.is_dir():
        return {}
    found = {
        split: [path for path in source.iterdir() if path.is_file() and split in path.name.split(".")]
        for split in SPLITS
    }
    if not all(found.values()):
        return {}
    for split, paths in found.items():
        if len(paths) > 1:
            names = " and ".join(sorted(path.name for path in paths))
            raise UserError(f"{source} has several files for {split}: {names}. Keep one of them there")
    return {split: paths[0] for split, paths in found.items()}


def _files(source: Path, pattern: str) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise UserError(f"there is no file or folder {source}")
    try:
        found = [path for path in source.rglob(pattern) if path.is_file()]
    except (NotImplementedError, ValueError) as problem:
        raise UserError(f"--files is a pattern such as '*.py', not {pattern!r}: {problem}") from None
    if not found:
        raise UserError(f"{source} has no files {pattern}: choose others with --files")
    return sorted(found, key=lambda path: path.relative_to(source).as_posix())


def _write_own(own: dict[str, Path], folder: Path) -> None:
    for split, path in own.items():
        limit = TEST_BYTES if split == "test" else None
        with (folder / f"{split}.txt").open("wb") as out:
            for chunk in _read([path], limit):
                out.write(chunk)


def _write_cut(files: Sequence[Path], num_bytes: int, folder: Path) -> None:
    text = b"".join(_read(files, num_bytes))
    first, second = len(text) * 90 // 100, len(text) * 95 // 100
    parts = text[:first], text[first:second], text[second:][:TEST_BYTES]
    if not all(parts):
        raise UserError(f"{len(text)} bytes are too few for a race: use more text")
    for split, part in zip(SPLITS, parts, strict=True):
        (folder / f"{split}.txt").write_bytes(part)


def _read(files: Sequence[Path], limit: int | None) -> Iterator[bytes]:
    """The first bytes of the joined files."""
    left = limit
    for path in files:
        try:
            with _opened(path) as file:
                while chunk := file.read(_CHUNK if left is None else min(_CHUNK, left)):
                    yield chunk
                    left = None if left is None else left - len(chunk)
        except (EOFError, lzma.LZMAError) as problem:
            raise UserError(f"{path} is damaged: {problem}") from None


def _opened(path: Path) -> IO[bytes]:
    return lzma.open(path, "rb") if path.suffix == ".xz" else path.open("rb")
