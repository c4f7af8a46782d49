"""Bytes: 256 tokens; it can encode any text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from longspan.config import TokenizerConfig
from longspan.data.corpus import Corpus
from longspan.data.text import decoded, whole_lines
from longspan.data.tokenizers.interface import Ids, Tokenizer


class ByteTokenizer(Tokenizer):
    """A token is a byte of the text's UTF-8 form."""

    form = kind = "byte"

    def __init__(self, *, lowercase: bool = False) -> None:
        self.lowercase = lowercase

    @staticmethod
    def fit(config: TokenizerConfig, corpus: Corpus) -> ByteTokenizer:
        return ByteTokenizer(lowercase=config.lowercase)

    @property
    def vocabulary_size(self) -> int:
        return 256

    def encode(self, text: str) -> Ids:
        return _ids((text.lower() if self.lowercase else text).encode("utf-8", "surrogateescape"))

    def encode_split(self, chunks: Iterable[bytes]) -> Iterator[Ids]:
        if self.lowercase:
            return map(self.encode, whole_lines(decoded(chunks)))
        return map(_ids, chunks)

    def pieces(self) -> list[bytes]:
        return [bytes([value]) for value in range(256)]

    def settings(self) -> dict[str, Any]:
        return {"lowercase": self.lowercase}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], folder: Path) -> ByteTokenizer:
        return cls(lowercase=settings["lowercase"])


def _ids(data: bytes) -> Ids:
    return np.frombuffer(data, dtype=np.uint8)
