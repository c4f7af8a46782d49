"""Files of JSON lines: every line is an object, and one of its fields is text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from longspan.data.checksums import stamp
from longspan.data.corpus import Corpus
from longspan.data.file_type import check_text, text_file
from longspan.errors import UserError
from longspan.files import alone, whole_file
from longspan.home import home

FIELD = "text"  # unless another one is asked for
_COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
_LONGEST = 1 << 28  # bytes of a line: JSON can only be read as a whole


def is_json_lines(path: Path) -> bool:
    """By its name; it may be compressed."""
    name = path.with_suffix("") if path.suffix in _COMPRESSED else path
    return name.suffix == ".jsonl"


def text_of(path: Path, field: str | None) -> Path:
    """The texts in a field, in a file in the cache; each ends with a newline."""
    field = FIELD if field is None else field
    source = text_file(path)
    identity = hashlib.blake2b(
        json.dumps([str(path.absolute()), stamp(source), field]).encode(), digest_size=8
    )
    copy = _folder() / f"{path.name.split('.')[0][:40]}-{identity.hexdigest()}"
    if not copy.is_file():
        texts = _texts(source, field, shown=path)
        first = next(texts, None)
        if first is None:
            raise UserError(f"{path} has no text in the field '{field}'")
        with alone(copy):
            if not copy.is_file():
                _write(copy, chain([first], texts))
    check_text(copy, shown=path)
    return copy


def _write(path: Path, texts: Iterable[bytes]) -> None:
    with whole_file(path) as partial, partial.open("wb") as file:
        for text in texts:
            file.write(text if text.endswith(b"\n") else text + b"\n")


def is_made_of(corpus: Corpus) -> bool:
    """Whether texts of this corpus come from JSON lines."""
    return any(piece.path.parent == _folder() for pieces in corpus.splits.values() for piece in pieces)


def _texts(source: Path, field: str, shown: Path) -> Iterator[bytes]:
    with source.open("rb") as file:
        number = 0
        while line := file.readline(_LONGEST + 1):
            number += 1
            where = f"line {number:,} of {shown}"
            if len(line) > _LONGEST:
                raise UserError(f"{where} is longer than {_LONGEST:,} bytes: write one text per line")
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                raise UserError(
                    f"{where} is not JSON: every line must be an object such as {_like(field)}"
                ) from None
            if not isinstance(entry, dict):
                raise UserError(f"{where} is not a JSON object such as {_like(field)}")
            if field not in entry:
                fields = ", ".join(map(repr, list(entry)[:8])) or "none"
                raise UserError(
                    f"{where} has no field '{field}' (it has {fields}): choose one with --data.field"
                )
            if not isinstance(entry[field], str):
                raise UserError(
                    f"{where} has no text in the field '{field}', but {json.dumps(entry[field])[:40]}"
                )
            text: bytes = entry[field].encode("utf-8", "surrogatepass")
            if text:
                yield text


def _like(field: str) -> str:
    return json.dumps({field: "..."})


def _folder() -> Path:
    return home() / "extracted"
