"""Tokenizers: one file per unit of text."""

from __future__ import annotations

import json
from pathlib import Path

from longspan.config import TokenizerConfig
from longspan.data.corpus import Corpus
from longspan.data.tokenizers.interface import SETTINGS, Tokenizer, TokenStream, id_type
from longspan.errors import UserError
from longspan.registry import TOKENIZERS

__all__ = ["TokenStream", "Tokenizer", "check_settings", "fit_tokenizer", "id_type", "load_tokenizer"]

_LEARNED = {"sentencepiece", "sentencepiece-default", "bpe"}
_LEAST = {"word": 3, "number": 1, "sentencepiece": 258, "bpe": 256}  # <eos>, <unk> and a word; the bytes


def fit_tokenizer(config: TokenizerConfig, corpus: Corpus) -> Tokenizer:
    """The tokenizer of a configuration, with a vocabulary learned from a corpus."""
    tokenizer: Tokenizer = TOKENIZERS[config.kind].resolve().fit(config, corpus)
    return tokenizer


def check_settings(config: TokenizerConfig) -> None:
    """A `UserError` for an option that this tokenizer needs or does not support."""
    if config.kind not in TOKENIZERS:
        raise UserError(f"no tokenizer is registered as '{config.kind}'")
    size, options = config.vocabulary_size, TOKENIZERS[config.kind].options
    if config.kind in _LEARNED and size is None:
        raise UserError(f"the {config.kind} tokenizer needs a vocabulary_size, for example 8000")
    if size is not None and "vocabulary_size" not in options:
        raise UserError(
            f"the text determines the vocabulary of the {config.kind} tokenizer: drop vocabulary_size"
        )
    least = _LEAST.get(config.kind, 0)
    if size is not None and size < least:
        raise UserError(f"a vocabulary_size of {size} is too small for {config.kind}: at least {least}")
    if config.lowercase and "lowercase" not in options:
        raise UserError(f"the {config.kind} tokenizer does not turn text to lower case: drop lowercase")
    default = TokenizerConfig().order
    if config.order != default and "order" not in options:
        raise UserError(f"the {config.kind} tokenizer has a fixed order: drop order, or set it to {default}")
    if config.fit_bytes is not None and "fit_bytes" not in options:
        raise UserError(f"the {config.kind} tokenizer reads all of the text: drop fit_bytes")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote to `folder`."""
    path = Path(folder) / SETTINGS
    damaged = UserError(f"the tokenizer in {folder} is damaged: put back the whole folder")
    if path.exists() and not path.is_file():  # a named pipe would never end
        raise damaged
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        kind = settings["kind"]
    except FileNotFoundError as problem:
        raise UserError(f"there is no tokenizer in {folder}: {problem.filename} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise damaged from None
    if not isinstance(kind, str) or kind not in TOKENIZERS:
        raise UserError(
            f"the tokenizer in {folder} is of the kind {kind!r}, which is not registered: name "
            "the plugin that registers it with --plugin"
        )
    try:
        tokenizer: Tokenizer = TOKENIZERS[kind].resolve().from_settings(settings, Path(folder))
    except FileNotFoundError as problem:
        raise UserError(f"there is no tokenizer in {folder}: {problem.filename} is missing") from None
    except Exception:  # any error of JSON, SentencePiece or tokenizers
        raise damaged from None
    return tokenizer
