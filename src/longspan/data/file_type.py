"""Whether a file is text: by its bytes, not by its name. Compressed text is unpacked into the cache."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from longspan.data.checksums import chunks, remembered, stamp
from longspan.errors import UserError
from longspan.files import alone, whole_file
from longspan.home import home

# How each compressed format begins, and what opens it.
_COMPRESSED: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b\x08": gzip.open,
    b"\xfd7zXZ\0": lzma.open,
    **{b"BZh%d1AY&SY" % level: bz2.open for level in range(1, 10)},
}
_ZSTD, _ZIP = b"\x28\xb5\x2f\xfd", b"PK\x03\x04"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_BINARY = "to read its bytes as they are, use --binary with the byte tokenizer"
# Characters without a place in text: all controls but those of white space, backspace and escape.
_CONTROLS = [*range(1, 8), *range(14, 27), *range(28, 32), 127]
_MOST_CONTROLS = 0.02  # of all bytes; random bytes have ten percent


def text_file(path: Path) -> Path:
    """The file to read: itself, or an unpacked copy if it is compressed. Anything but text is an error."""
    beginning = _beginning(path)
    for magic, open_compressed in _COMPRESSED.items():
        if beginning.startswith(magic):
            copy = _unpacked(path, open_compressed)
            check_text(copy, shown=path)
            return copy
    check_text(path, shown=path)
    return path


def hides_text(beginning: bytes) -> bool:
    """Whether a file that begins like this is compressed or UTF-16, so that its text is not seen."""
    return beginning.startswith((*_COMPRESSED, _ZSTD, *_UTF_16))


def is_text(beginning: bytes) -> bool:
    """Whether a file that begins like this is plain text."""
    size, zeros, controls = _count([beginning])
    return not hides_text(beginning) and not zeros and controls <= _MOST_CONTROLS * size


def check_text(path: Path, shown: Path) -> None:
    """A `UserError` about `shown` if the file at `path` is not text."""
    beginning = _beginning(path)
    if beginning.startswith(_ZSTD):
        raise UserError(f"{shown} is compressed with zstd: unpack it first, with 'zstd -d'")
    if beginning.startswith(_ZIP):
        raise UserError(f"{shown} is a zip archive: unpack it first, with 'unzip'")
    if beginning.startswith(_UTF_16):
        raise UserError(f"{shown} is UTF-16: convert it to UTF-8 first, with 'iconv -f UTF-16 -t UTF-8'")
    size, zeros, controls = remembered(path, "controls", lambda: _count(chunks(path)))
    if zeros or controls > _MOST_CONTROLS * size:
        what = f"{zeros:,} NUL bytes" if zeros else f"{controls:,} control characters"
        raise UserError(f"{shown} is not text (it has {what}): give a text file; {_BINARY}")


def _count(parts: Iterable[bytes]) -> tuple[int, int, int]:
    """How many bytes there are, how many are NUL, and how many are other control characters."""
    counts = np.zeros(256, dtype=np.int64)
    for chunk in parts:
        counts += np.bincount(np.frombuffer(chunk, dtype=np.uint8), minlength=256)
    return int(counts.sum()), int(counts[0]), int(counts[_CONTROLS].sum())


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(10)


def _unpacked(path: Path, open_compressed: Callable[[Path], Any]) -> Path:
    identity = hashlib.blake2b(json.dumps([str(path.absolute()), stamp(path)]).encode(), digest_size=8)
    copy = home() / "unpacked" / f"{path.stem[:40]}-{identity.hexdigest()}"
    if not copy.is_file():
        with alone(copy):
            if not copy.is_file():
                _unpack(path, open_compressed, copy)
    return copy


def _unpack(path: Path, open_compressed: Callable[[Path], Any], copy: Path) -> None:
    with whole_file(copy) as partial, open_compressed(path) as packed, partial.open("wb") as file:
        try:
            while chunk := packed.read(1 << 20):
                file.write(chunk)
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as problem:
            raise UserError(f"{path} is damaged and cannot be unpacked: {problem}") from None
        except OSError as problem:
            if problem.errno is not None:  # of the disk; those of bz2 have no number
                raise
            raise UserError(f"{path} is damaged and cannot be unpacked: {problem}") from None
