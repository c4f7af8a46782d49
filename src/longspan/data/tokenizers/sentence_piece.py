"""SentencePiece: pieces of words, learned from the train split.

Text is not normalised and characters outside the vocabulary fall back to bytes, so decoding returns the text
(in lower case if asked). U+2581 becomes a blank, since SentencePiece uses it for blanks. A newline is its own
piece, and pieces never cross lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from longspan.config import TokenizerConfig
from longspan.data.corpus import Corpus
from longspan.data.text import lines, readable
from longspan.data.tokenizers.fitting import every_nth, fit_texts, learn
from longspan.data.tokenizers.interface import Ids, TextTokenizer

_MODEL = "sentencepiece.model"
_LONGEST = 4096  # the most characters of a line for the trainer
_LONG_WORD_BYTES = 100_000  # of words without end, about so much: their time grows fast
_BLANK = "\u2581"  # how SentencePiece writes a blank


class SentencePieceTokenizer(TextTokenizer):
    """A token is a piece of a unigram model, the most likely first.

    SentencePiece itself puts the bytes first, which are rare in text. Here they are last, so that the
    vocabulary is sorted by frequency, as an adaptive softmax needs.
    """

    form = kind = "sentencepiece"

    def __init__(self, model: bytes, *, lowercase: bool = False) -> None:
        self.model = model
        self.lowercase = lowercase
        self._pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._order = sorted(range(self.vocabulary_size), key=self._is_spare)
        self._token_of = np.argsort(self._order).astype(np.int32)

    @staticmethod
    def fit(config: TokenizerConfig, corpus: Corpus) -> SentencePieceTokenizer:
        model = _learned(
            config,
            corpus,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            user_defined_symbols=["\n"],
            unk_piece="<unused>",  # the usual name, <unk>, is an ordinary word of WikiText
            bos_id=-1,
            eos_id=-1,
        )
        return SentencePieceTokenizer(model, lowercase=config.lowercase)

    @property
    def vocabulary_size(self) -> int:
        return int(self._pieces.vocab_size())

    def encode(self, text: str) -> Ids:
        text = readable(text.lower() if self.lowercase else text)
        ids = chain.from_iterable(self._pieces.encode(lines(text)))
        return self._token_of[np.fromiter(ids, dtype=np.int32)]

    def pieces(self) -> list[bytes]:
        return [self._bytes_of(number) for number in self._order]

    def settings(self) -> dict[str, Any]:
        return {"lowercase": self.lowercase}

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / _MODEL).write_bytes(self.model)

    @classmethod
    def from_settings(cls, settings: dict[str, Any], folder: Path) -> SentencePieceTokenizer:
        return cls((folder / _MODEL).read_bytes(), lowercase=settings["lowercase"])

    def _is_spare(self, number: int) -> bool:
        return bool(self._pieces.is_byte(number) or self._pieces.is_unknown(number))

    def _bytes_of(self, number: int) -> bytes:
        piece = self._pieces.id_to_piece(number)
        if self._pieces.is_byte(number):
            return bytes([int(piece[1:-1], 16)])  # <0x0A>
        return str(piece).replace(_BLANK, " ").encode()


class DefaultSentencePieceTokenizer(SentencePieceTokenizer):
    """SentencePiece with its default settings, to compare with numbers that were made this way.

    Text is normalised (NFKC, blanks collapsed), line ends are lost, and a rare character is `<unk>`, token 0.
    So the word `<unk>` of WikiText is six tokens, two of them unknown.
    """

    form = kind = "sentencepiece-default"
    unknown_id = 0

    @staticmethod
    def fit(config: TokenizerConfig, corpus: Corpus) -> DefaultSentencePieceTokenizer:
        model = _learned(config, corpus, normalization_rule_name="nmt_nfkc")
        return DefaultSentencePieceTokenizer(model, lowercase=config.lowercase)

    def _is_spare(self, number: int) -> bool:
        return False

    def _bytes_of(self, number: int) -> bytes:
        return b"<unk>" if number == self.unknown_id else super()._bytes_of(number)


def _learned(config: TokenizerConfig, corpus: Corpus, **settings: Any) -> bytes:
    """Train a SentencePiece model on a corpus; the serialized model."""
    texts = fit_texts(config, corpus, long_words=_LONG_WORD_BYTES)
    return learn(
        "sentencepiece",
        corpus,
        islice(_pieces(texts), 0, None, every_nth(config, corpus)),
        {
            "vocab_size": config.vocabulary_size,
            "hard_vocab_limit": False,
            "max_sentence_length": 4 * _LONGEST,
            "num_threads": 1,  # the same pieces on every machine
            "minloglevel": 2,
            **settings,
        },
    )


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _LONGEST):
                yield line[start : start + _LONGEST]
