"""Characters: a token is a code point, the vocabulary is the alphabet of the whole corpus.

The alphabet includes the held-out splits: which characters exist is no secret of theirs, and so every
text of the corpus can be said without an unknown token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from longspan.config import TokenizerConfig
from longspan.data.corpus import SPLITS, Corpus
from longspan.data.text import decoded
from longspan.data.tokenizers.interface import ByteStream, Ids, Tokenizer, TokenStream, lacking
from longspan.data.tokenizers.vocabulary import code_points, count_characters, in_order

_UNICODE = 0x110000


class CharacterTokenizer(Tokenizer):
    """A token is a code point."""

    form = kind = "character"

    def __init__(self, characters: str, *, lowercase: bool = False) -> None:
        self.characters = characters
        self.lowercase = lowercase
        self._ids = np.full(_UNICODE, -1, dtype=np.int32)
        self._ids[code_points(characters)] = np.arange(len(characters))

    @staticmethod
    def fit(config: TokenizerConfig, corpus: Corpus) -> CharacterTokenizer:
        chunks = chain.from_iterable(corpus.read(split) for split in SPLITS)
        counts = count_characters(decoded(chunks, lowercase=config.lowercase))
        return CharacterTokenizer("".join(in_order(counts, config.order)), lowercase=config.lowercase)

    @property
    def vocabulary_size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Ids:
        text = text.lower() if self.lowercase else text
        codes = code_points(text)
        ids = self._ids[codes]
        if ids.size and ids.min() < 0:
            raise lacking("characters", map(chr, codes[ids < 0].tolist()))
        return ids

    def encode_split(self, chunks: Iterable[bytes]) -> Iterator[Ids]:
        return map(self.encode, decoded(chunks))

    def stream(self) -> TokenStream:
        return ByteStream([character.encode("utf-8", "surrogateescape") for character in self.characters])

    def settings(self) -> dict[str, Any]:
        return {"lowercase": self.lowercase, "characters": self.characters}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], folder: Path) -> CharacterTokenizer:
        return cls(settings["characters"], lowercase=settings["lowercase"])
