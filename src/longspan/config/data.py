"""Options of the corpus and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from longspan.config.schema import chosen_section, option
from longspan.registry import TOKENIZERS

LARGEST_VOCABULARY = 2**22  # libraries that fit tokenizers allocate memory for all of it, and abort without

MOST_PROCESSES = 1024


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
    fit_bytes: int | None = option(
        None,
        help="sentencepiece, bpe: learn the vocabulary from about this many bytes, every n-th line; 0: from "
        "all of the text (default: 33,554,432)",
    )

    def __post_init__(self) -> None:
        if self.fit_bytes is not None and self.fit_bytes < 0:
            raise ValueError("fit_bytes must be 0 (all of the text) or more")
        if self.vocabulary_size is not None and not 1 <= self.vocabulary_size <= LARGEST_VOCABULARY:
            raise ValueError(
                f"vocabulary_size must be between 1 and {LARGEST_VOCABULARY:,}, not {self.vocabulary_size:,}"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A corpus and its tokenizer."""

    corpus: str = option(
        "python",
        help="a named corpus (see 'longspan data list'), a text file or a folder, a glob such as "
        "'texts/*.txt', files separated by commas, or - for standard input",
    )
    field: str | None = option(
        None,
        help="the field of JSON lines that has the text; for .jsonl files, and for standard input if given "
        "(default: text)",
    )
    binary: bool = option(False, help="take any bytes, not only text; for the byte tokenizer")
    processes: int | None = option(
        None, help="processes that turn text into tokens (default: the usable cores; small texts: 1)"
    )
    tokenizer: TokenizerConfig = chosen_section(
        TokenizerConfig, "kind", TOKENIZERS, help="how text becomes tokens", tag_help="the unit of text"
    )

    def __post_init__(self) -> None:
        if self.processes is not None and not 1 <= self.processes <= MOST_PROCESSES:
            raise ValueError(f"processes must be between 1 and {MOST_PROCESSES}, not {self.processes}")
        if self.binary and self.field is not None:
            raise ValueError("binary takes bytes as they are: leave out field")
        if self.binary and (self.tokenizer.kind != "byte" or self.tokenizer.lowercase):
            raise ValueError("binary takes bytes as they are: use the byte tokenizer, without lowercase")
