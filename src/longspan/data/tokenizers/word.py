"""Words, separated by whitespace, with `<eos>` at the end of every line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from longspan.config import TokenizerConfig
from longspan.data.corpus import Corpus
from longspan.data.text import decoded, readable
from longspan.data.tokenizers.interface import Ids, TextTokenizer, TokenStream, lacking
from longspan.data.tokenizers.vocabulary import EOS, UNKNOWN, count_words, in_order, words_of


class WordTokenizer(TextTokenizer):
    """A token is a word. With `unknown`, words outside the vocabulary are `<unk>`; without, an error."""

    form = "word"

    def __init__(
        self, words: list[str], *, kind: str = "word", lowercase: bool = False, unknown: bool = True
    ) -> None:
        self.words = words
        self.kind = kind
        self.lowercase = lowercase
        self.unknown = unknown
        ids = {word: index for index, word in enumerate(words)}
        self._ids = _WithUnknown(ids) if unknown else ids
        self.unknown_id = ids[UNKNOWN] if unknown else None

    @staticmethod
    def fit(config: TokenizerConfig, corpus: Corpus) -> WordTokenizer:
        """The words of the train split, and always `<unk>`, since held-out text may need it."""
        texts = decoded(corpus.read("train"), lowercase=config.lowercase)
        counts = count_words(texts, corpus.size("train"))
        counts.setdefault(EOS, 0)
        counts.setdefault(UNKNOWN, 0)
        if config.vocabulary_size is not None:
            counts = _most_frequent(counts, config.vocabulary_size)
        return WordTokenizer(in_order(counts, config.order), lowercase=config.lowercase)

    @property
    def knows_text(self) -> bool:
        """False for the files that the originals prepared: words that are symbols of another text."""
        words = [word for word in self.words if word not in (EOS, UNKNOWN)]
        return not words or not (_all_numbers(words) or _all_letters(words))

    @property
    def vocabulary_size(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> Ids:
        words = words_of(text.lower() if self.lowercase else text)
        try:
            return np.fromiter(map(self._ids.__getitem__, words), dtype=np.int32, count=len(words))
        except KeyError:
            raise lacking("words", (word for word in words if word not in self._ids)) from None

    def texts(self, chunks: Iterable[bytes]) -> Iterator[str]:
        ended = True
        for text in super().texts(chunks):
            yield text
            ended = text.endswith("\n")
        if not ended:
            yield "\n"

    def pieces(self) -> list[bytes]:
        return [
            b"\n" if word == EOS else word.encode("utf-8", "surrogateescape") + b" " for word in self.words
        ]

    def stream(self) -> TokenStream:
        return WordStream(self.words)

    def settings(self) -> dict[str, Any]:
        return {"lowercase": self.lowercase, "unknown": self.unknown, "words": self.words}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], folder: Path) -> WordTokenizer:
        return cls(
            settings["words"],
            kind=settings["kind"],
            lowercase=settings["lowercase"],
            unknown=settings["unknown"],
        )


class WordStream(TokenStream):
    """Words with a blank between them; `<eos>` is a newline."""

    def __init__(self, words: list[str]) -> None:
        self._words = words
        self._between = ""

    def push(self, token: int) -> str:
        word = self._words[token]
        if word == EOS:
            self._between = ""
            return "\n"
        text = self._between + readable(word)
        self._between = " "
        return text

    def flush(self) -> str:
        self._between = ""
        return ""


def _all_numbers(words: list[str]) -> bool:
    """As in the originals' enwik8: every byte is its decimal number."""
    return all(word.isascii() and word.isdigit() for word in words)


def _all_letters(words: list[str]) -> bool:
    """As in the originals' text8: every character is a word, and a blank is `_`."""
    return "_" in words and all(len(word) == 1 for word in words)


class _WithUnknown(dict[str, int]):
    def __missing__(self, word: str) -> int:
        return self[UNKNOWN]


def _most_frequent(counts: dict[str, int], size: int) -> dict[str, int]:
    """The `size` most frequent words, including `<eos>` and `<unk>`; `<unk>` counts the rest."""
    ranked = [word for word in in_order(counts, "frequency") if word not in (EOS, UNKNOWN)]
    dropped = set(ranked[max(size - 2, 0) :])
    kept = {word: count for word, count in counts.items() if word not in dropped}
    kept[UNKNOWN] += sum(counts[word] for word in dropped)
    return kept
