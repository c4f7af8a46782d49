"""The vocabularies of the original projects, rebuilt from the text as each of them read it.

- adaptive-span counts the train split. Order: first seen, or by count with ties last seen first;
  here also sorted.
- sha-rnn counts the train split. Order: by count, ties first seen first.
- transformer-xl counts all splits and leaves newlines out; of word corpora it counts the train split, and
  `<eos>` comes first. Order: by count, ties first seen first.

None has an unknown token: a held-out word that is not in the counted text is an error.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from longspan.config import TokenizerConfig
from longspan.data.corpus import SPLITS, Corpus
from longspan.data.text import decoded
from longspan.data.tokenizers.interface import Tokenizer
from longspan.data.tokenizers.symbols import SymbolTokenizer, as_read
from longspan.data.tokenizers.vocabulary import EOS, Symbol, count_bytes, count_words, in_order
from longspan.data.tokenizers.word import WordTokenizer


def fit_original(config: TokenizerConfig, corpus: Corpus) -> Tokenizer:
    """The tokenizer of the project `config.kind`, for the format in which it stored this corpus."""
    if corpus.form == "words":
        return _fit_words(config, corpus)
    letters, newlines = corpus.form == "letters", config.kind != "transformer-xl"
    splits = SPLITS if config.kind == "transformer-xl" else SPLITS[:1]
    seen = (as_read(corpus.read(split), letters=letters, newlines=newlines) for split in splits)
    symbols = _ordered(count_bytes(chain.from_iterable(seen)), config)
    return SymbolTokenizer(config.kind, bytes(symbols), letters=letters)


class OriginalTokenizer:
    """What the kinds `adaptive-span`, `sha-rnn` and `transformer-xl` are registered with."""

    fit = staticmethod(fit_original)

    @staticmethod
    def from_settings(settings: dict[str, Any], folder: Path) -> Tokenizer:
        form: type[Tokenizer] = WordTokenizer if settings["form"] == WordTokenizer.form else SymbolTokenizer
        return form.from_settings(settings, folder)


def _fit_words(config: TokenizerConfig, corpus: Corpus) -> Tokenizer:
    words = _ordered(count_words(decoded(corpus.read("train")), corpus.size("train")), config)
    if config.kind == "transformer-xl":
        words = [EOS, *(word for word in words if word != EOS)]
    return WordTokenizer(words, kind=config.kind, unknown=False)


def _ordered(counts: dict[Symbol, int], config: TokenizerConfig) -> list[Symbol]:
    if config.kind != "adaptive-span":
        return in_order(counts, "frequency")
    if config.order != "frequency":
        return in_order(counts, config.order)
    return in_order(dict(reversed(counts.items())), "frequency")
