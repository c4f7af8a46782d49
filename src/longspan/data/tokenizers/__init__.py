"""Tokenizers: one file per unit of text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from longspan.config import TokenizerConfig
from longspan.data.corpus import Corpus
from longspan.data.tokenizers.bpe import BpeTokenizer
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.data.tokenizers.character import CharacterTokenizer
from longspan.data.tokenizers.interface import SETTINGS, Tokenizer, TokenStream, id_type
from longspan.data.tokenizers.number import NumberTokenizer
from longspan.data.tokenizers.originals import fit_original
from longspan.data.tokenizers.sentence_piece import DefaultSentencePieceTokenizer, SentencePieceTokenizer
from longspan.data.tokenizers.symbols import SymbolTokenizer
from longspan.data.tokenizers.word import WordTokenizer
from longspan.errors import UserError

__all__ = ["TokenStream", "Tokenizer", "check_settings", "fit_tokenizer", "id_type", "load_tokenizer"]

_FIT: dict[str, Callable[[TokenizerConfig, Corpus], Tokenizer]] = {
    "byte": ByteTokenizer.fit,
    "character": CharacterTokenizer.fit,
    "word": WordTokenizer.fit,
    "number": NumberTokenizer.fit,
    "sentencepiece": SentencePieceTokenizer.fit,
    "sentencepiece-default": DefaultSentencePieceTokenizer.fit,
    "bpe": BpeTokenizer.fit,
    "adaptive-span": fit_original,
    "sha-rnn": fit_original,
    "transformer-xl": fit_original,
}
_LEARNED = {"sentencepiece", "sentencepiece-default", "bpe"}
_ORDERED = {"character", "word", "adaptive-span"}
_SIZED = {"word", "number", *_LEARNED}
_LEAST = {"word": 3, "number": 1, "sentencepiece": 258, "bpe": 256}  # <eos>, <unk> and a word; the bytes
_FORMS: dict[str, type[Tokenizer]] = {
    cls.form: cls
    for cls in (
        ByteTokenizer,
        CharacterTokenizer,
        WordTokenizer,
        NumberTokenizer,
        SentencePieceTokenizer,
        DefaultSentencePieceTokenizer,
        BpeTokenizer,
        SymbolTokenizer,
    )
}


def fit_tokenizer(config: TokenizerConfig, corpus: Corpus) -> Tokenizer:
    """The tokenizer of a configuration, with a vocabulary learned from a corpus."""
    return _FIT[config.kind](config, corpus)


def check_settings(config: TokenizerConfig) -> None:
    """A `UserError` for an option that this tokenizer needs or does not support."""
    size = config.vocabulary_size
    if config.kind in _LEARNED and size is None:
        raise UserError(f"the {config.kind} tokenizer needs a vocabulary_size, for example 8000")
    if size is not None and config.kind not in _SIZED:
        raise UserError(
            f"the text determines the vocabulary of the {config.kind} tokenizer: drop vocabulary_size"
        )
    least = _LEAST.get(config.kind, 0)
    if size is not None and size < least:
        raise UserError(f"a vocabulary_size of {size} is too small for {config.kind}: at least {least}")
    if config.lowercase and _FIT[config.kind] is fit_original:
        raise UserError(f"the {config.kind} project did not lower-case its text: drop lowercase")
    if config.order != TokenizerConfig().order and config.kind not in _ORDERED:
        raise UserError(f"the {config.kind} tokenizer has a fixed order: drop order")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote to `folder`."""
    path = Path(folder) / SETTINGS
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        return _FORMS[settings["form"]].from_settings(settings, Path(folder))
    except FileNotFoundError as problem:
        raise UserError(f"there is no tokenizer in {folder}: {problem.filename} is missing") from None
    except Exception:  # any error of JSON, SentencePiece or tokenizers
        raise UserError(f"the tokenizer in {folder} is damaged: restore the whole folder") from None
