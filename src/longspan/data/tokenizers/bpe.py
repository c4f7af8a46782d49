"""Byte pair encoding over bytes, learned from the train split: it can encode any text."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from longspan.config import TokenizerConfig
from longspan.data.corpus import Corpus
from longspan.data.text import lines, readable
from longspan.data.tokenizers.fitting import every_nth, fit_texts, learn
from longspan.data.tokenizers.interface import Ids, TextTokenizer

_MODEL = "bpe.json"


class BpeTokenizer(TextTokenizer):
    """A token is a frequent sequence of bytes; a newline always ends it."""

    form = kind = "bpe"

    def __init__(self, model: tokenizers.Tokenizer, *, lowercase: bool = False) -> None:
        self.model = model
        self.lowercase = lowercase

    @staticmethod
    def fit(config: TokenizerConfig, corpus: Corpus) -> BpeTokenizer:
        assert config.vocabulary_size is not None  # checked by `check_settings`
        texts, every = fit_texts(config, corpus), every_nth(config, corpus)
        if every > 1:
            texts = islice((line for text in texts for line in lines(text)), 0, None, every)
        model = learn("bpe", corpus, texts, {"vocab_size": config.vocabulary_size})
        return BpeTokenizer(tokenizers.Tokenizer.from_buffer(model), lowercase=config.lowercase)

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.get_vocab_size())

    def encode(self, text: str) -> Ids:
        text = readable(text.lower() if self.lowercase else text)
        encodings = self.model.encode_batch_fast(lines(text), add_special_tokens=False)
        return np.concatenate([np.empty(0, np.int32), *(np.array(e.ids, np.int32) for e in encodings)])

    def pieces(self) -> list[bytes]:
        byte_of = _byte_of_letter()
        vocabulary = sorted(self.model.get_vocab().items(), key=lambda entry: entry[1])
        return [bytes(byte_of[letter] for letter in token) for token, _ in vocabulary]

    def settings(self) -> dict[str, Any]:
        return {"lowercase": self.lowercase}

    def save(self, folder: Path) -> None:
        super().save(folder)
        self.model.save(str(folder / _MODEL))

    @classmethod
    def from_settings(cls, settings: dict[str, Any], folder: Path) -> BpeTokenizer:
        data = (folder / _MODEL).read_bytes()
        return cls(tokenizers.Tokenizer.from_buffer(data), lowercase=settings["lowercase"])


def _byte_of_letter() -> dict[str, int]:
    """Byte-level models spell bytes as letters: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
