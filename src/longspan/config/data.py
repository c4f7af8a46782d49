"""Which text a run reads, and how it becomes tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longspan.config.schema import chosen_section, option
from longspan.registry import TOKENIZERS


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes numbers.

    `adaptive-span`, `sha-rnn` and `transformer-xl` prepare text as those projects did, newlines, `<eos>`
    and order of the vocabulary included; use them to compare with published numbers. `sentencepiece-default`
    is for the same: it loses line ends and rare characters, where `sentencepiece` loses nothing. `number`
    reads text that holds the numbers of tokens.
    """

    kind: str = option("byte", help="the unit of text")
    vocabulary_size: int | None = option(
        None,
        help="pieces of sentencepiece and bpe; for words, keep only the most frequent; how many numbers",
    )
    lowercase: bool = option(False, help="turn text to lower case first")
    order: Literal["frequency", "first-seen"] = option(
        "frequency", help="how words and characters are numbered"
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A corpus and its tokenizer."""

    corpus: str = option("python", help="a named corpus (see 'longspan data list'), a text file or a folder")
    tokenizer: TokenizerConfig = chosen_section(
        TokenizerConfig, "kind", TOKENIZERS, help="how text becomes tokens", tag_help="the unit of text"
    )
