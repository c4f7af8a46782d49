"""Characters: a token is a code point, the vocabulary is the alphabet of the whole corpus.

The alphabet includes the held-out splits, so that no text of the corpus needs an unknown token. It reveals
only which characters exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from longspan.config import TokenizerConfig
from longspan.data.corpus import SPLITS, Corpus
from longspan.data.text import decoded, whole_lines
from longspan.data.tokenizers.interface import Ids, Tokenizer, lacking
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
        # Each split separately, as it is encoded: a cut may be inside a character.
        splits = (decoded(corpus.read(split), lowercase=config.lowercase) for split in SPLITS)
        counts = count_characters(chain.from_iterable(splits))
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
        texts = decoded(chunks)
        return map(self.encode, whole_lines(texts) if self.lowercase else texts)

    def pieces(self) -> list[bytes]:
        return [character.encode("utf-8", "surrogateescape") for character in self.characters]

    def settings(self) -> dict[str, Any]:
        return {"lowercase": self.lowercase, "characters": self.characters}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], folder: Path) -> CharacterTokenizer:
        return cls(settings["characters"], lowercase=settings["lowercase"])
