"""The words of a dictionary of fairseq, with fairseq's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from longspan.config import TokenizerConfig
from longspan.data.corpus import Corpus
from longspan.data.data_bin import DataBin, symbols
from longspan.data.tokenizers.interface import Ids, TokenStream
from longspan.data.tokenizers.number import NumberTokenizer
from longspan.data.tokenizers.vocabulary import EOS
from longspan.data.tokenizers.word import WordStream
from longspan.errors import UserError

END, UNKNOWN = 2, 3


class FairseqTokenizer(NumberTokenizer):
    """Splits of a prepared folder are numbers already; a prompt is words, and a newline is `</s>`."""

    form = "fairseq"
    kind = "fairseq"

    def __init__(self, words: list[str]) -> None:
        super().__init__(len(words))
        self._words = words
        self._numbers = {word: number for number, word in reversed(list(enumerate(words)))}
        self.unknown_id = UNKNOWN

    @staticmethod
    def fit(config: TokenizerConfig, corpus: Corpus) -> FairseqTokenizer:
        if not isinstance(corpus, DataBin):
            raise UserError(
                f"the fairseq tokenizer needs a folder that fairseq prepared, and {corpus.name} is none"
            )
        return FairseqTokenizer(symbols(corpus.folder))

    def encode(self, text: str) -> Ids:
        words = text.replace("\n", f" {self._words[END]} ").split()
        return np.array([self._numbers.get(word, UNKNOWN) for word in words], dtype=np.int64)

    def encode_text(self, text: str) -> Ids:
        return super().encode(text)

    def pieces(self) -> list[bytes]:
        return [b"\n" if number == END else f"{word} ".encode() for number, word in enumerate(self._words)]

    def stream(self) -> TokenStream:
        return WordStream([EOS if number == END else word for number, word in enumerate(self._words)])

    def settings(self) -> dict[str, Any]:
        return {"words": self._words}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], folder: Path) -> FairseqTokenizer:
        return cls(settings["words"])
