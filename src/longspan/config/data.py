"""Options of the corpus and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longspan.config.schema import chosen_section, option
from longspan.registry import TOKENIZERS


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes tokens.

    `adaptive-span`, `sha-rnn` and `transformer-xl` prepare text as those projects did, including newlines,
    `<eos>` and the order of the vocabulary. Use them to compare with published numbers. So is
    `sentencepiece-default`: it loses line ends and rare characters; `sentencepiece` loses nothing. `number`
    reads text that consists of token numbers.
    """

    kind: str = option("byte", help="the unit of text")
    vocabulary_size: int | None = option(
        None,
        help="sentencepiece, bpe: pieces; word: most frequent words to keep; number: how many numbers",
    )
    lowercase: bool = option(False, help="convert text to lower case first")
    order: Literal["frequency", "first-seen", "sorted"] = option(
        "frequency", help="order in which words and characters are numbered"
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A corpus and its tokenizer."""

    corpus: str = option("python", help="a named corpus (see 'longspan data list'), a text file or a folder")
    tokenizer: TokenizerConfig = chosen_section(
        TokenizerConfig, "kind", TOKENIZERS, help="how text becomes tokens", tag_help="the unit of text"
    )
