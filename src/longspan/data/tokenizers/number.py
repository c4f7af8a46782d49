"""Token numbers as text: for text tokenized elsewhere, or an unknown vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from longspan.config import TokenizerConfig
from longspan.data.corpus import Corpus
from longspan.data.text import decoded, whole_lines
from longspan.data.tokenizers.interface import Ids, TextTokenizer, TokenStream
from longspan.data.tokenizers.word import WordStream
from longspan.errors import UserError

MOST_DIGITS = 9  # fits into 32 bits


class NumberTokenizer(TextTokenizer):
    """Token 7 is the text "7"; whitespace separates tokens."""

    form = "number"
    kind = "number"

    def __init__(self, vocabulary_size: int) -> None:
        self._size = vocabulary_size

    @staticmethod
    def fit(config: TokenizerConfig, corpus: Corpus) -> NumberTokenizer:
        """The vocabulary size of the configuration, or of the train split."""
        if config.vocabulary_size is not None:
            return NumberTokenizer(config.vocabulary_size)
        largest = (ids.max() for ids in _numbers(corpus.read("train")) if len(ids))
        return NumberTokenizer(1 + int(max(largest, default=0)))

    @property
    def knows_text(self) -> bool:
        """No: what a number stands for is unknown."""
        return False

    @property
    def vocabulary_size(self) -> int:
        return self._size

    def encode(self, text: str) -> Ids:
        ids = _parsed(text)
        if len(ids) and ids.max() >= self._size:
            raise UserError(f"the tokens are 0 to {self._size - 1}, but the text has the number {ids.max()}")
        return ids

    def pieces(self) -> list[bytes]:
        return [b"%d " % token for token in range(self._size)]

    def stream(self) -> TokenStream:
        return WordStream([str(token) for token in range(self._size)])

    def settings(self) -> dict[str, Any]:
        return {"vocabulary_size": self._size}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], folder: Path) -> NumberTokenizer:
        return cls(settings["vocabulary_size"])


def _numbers(chunks: Iterable[bytes]) -> Iterator[Ids]:
    return map(_parsed, whole_lines(decoded(chunks)))


def _parsed(text: str) -> Ids:
    words = text.split()
    wrong = (word for word in words if not (word.isascii() and word.isdigit() and len(word) <= MOST_DIGITS))
    shown = ", ".join(repr(word[:20]) for word in islice(wrong, 3))
    if shown:
        raise UserError(f"the text must be token numbers separated by blanks, but it has {shown}")
    return np.array(words, dtype=np.int64) if words else np.empty(0, dtype=np.int64)
