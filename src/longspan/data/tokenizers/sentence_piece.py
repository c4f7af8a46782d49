"""SentencePiece: pieces of words, learned from the train split.

Nothing is normalised away and characters outside the vocabulary fall back to bytes, so decoding gives back
the text: in lower case if asked, and with a blank for U+2581, which is how SentencePiece writes a blank.
A newline is a piece of its own, and pieces never cross lines.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from longspan.config import TokenizerConfig
from longspan.data.corpus import Corpus
from longspan.data.text import decoded, lines, readable, whole_lines
from longspan.data.tokenizers.interface import Ids, Tokenizer
from longspan.errors import UserError

_MODEL = "sentencepiece.model"
_SAMPLE_BYTES = 32 << 20  # the trainer holds its text in memory: from longer texts it gets every n-th line
_LONGEST = 4096  # characters of a line the trainer takes at once
_SOURCE = re.compile(r"^.*\.cc\(\d+\) \[.*\] ?")  # where in its C++ an error was noticed, and by which test
_BLANK = "\u2581"  # how SentencePiece writes a blank


class SentencePieceTokenizer(Tokenizer):
    """A token is a piece of a unigram model, the likeliest first.

    SentencePiece itself puts the bytes first, which hardly any text needs. Here they are last: a softmax that
    is cut by frequency finds the frequent pieces where it looks for them.
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

    def encode_split(self, chunks: Iterable[bytes]) -> Iterator[Ids]:
        return map(self.encode, whole_lines(decoded(chunks)))

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
    """SentencePiece as it is set up when nobody says anything else, for comparing with numbers made so.

    Text is normalised (NFKC, blanks collapsed), lines follow each other without a sign, and a character that
    is too rare is `<unk>`, token 0. So `<unk>` as WikiText writes it is six tokens, two of them unknown.
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
    """The pieces of a corpus, in SentencePiece's own format."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sample(corpus, config.lowercase),
            model_writer=model,
            vocab_size=config.vocabulary_size,
            hard_vocab_limit=False,
            max_sentence_length=4 * _LONGEST,
            num_threads=1,  # the same pieces on every machine
            minloglevel=2,
            **settings,
        )
    except RuntimeError as problem:
        reason = _SOURCE.sub("", " ".join(str(problem).split())) or "it does not say why"
        raise UserError(
            f"sentencepiece could not learn {config.vocabulary_size} pieces from {corpus.name}: {reason}"
        ) from None
    return model.getvalue()


def _sample(corpus: Corpus, lowercase: bool) -> Iterator[str]:
    every = 1 + corpus.size("train") // _SAMPLE_BYTES
    texts = whole_lines(decoded(corpus.read("train"), lowercase=lowercase))
    return islice((piece for text in texts for piece in _pieces(readable(text))), 0, None, every)


def _pieces(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        for start in range(0, len(line), _LONGEST):
            yield line[start : start + _LONGEST]
