"""The result of an evaluation, with everything that is needed to interpret it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Score:
    """Nats over the scored tokens, and the denominators that turn them into the usual figures.

    `bytes`, `characters` and `words` measure the raw text of the scored tokens. Words are separated by
    whitespace, and the end of a line is a word too. Scores over them can be compared across tokenizers that
    lose nothing. If text is lost, by lower case or as `unknown` tokens (`<unk>`), they are too low: the text
    counts, but the model does not have to predict it.
    `divisor` is what the protocol divides by: the number of scored tokens, except for `sha-rnn`.
    A value beyond the range of floats is infinite.
    """

    nats: float
    tokens: int
    divisor: int
    bytes: int
    characters: int
    words: int
    unknown: int
    skipped: int
    skipped_because: str
    protocol: str
    batch_size: int
    block_length: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.divisor

    @property
    def bits_per_token(self) -> float:
        """Papers on byte-level and character-level data call this bits per character."""
        return self.loss / math.log(2)

    @property
    def perplexity(self) -> float:
        """Per token."""
        return _exp(self.loss)

    @property
    def perplexity_per_word(self) -> float:
        """Papers on word-level data call this perplexity, whatever the tokens are."""
        return _exp(_per(self.nats, self.words))

    @property
    def bits_per_byte(self) -> float:
        """Bits over the UTF-8 bytes of the scored text."""
        return _per(self.nats / math.log(2), self.bytes)

    @property
    def bits_per_character(self) -> float:
        """Bits over the Unicode characters of the scored text."""
        return _per(self.nats / math.log(2), self.characters)

    def figures(self) -> dict[str, Any]:
        """Everything as JSON: the finite scores, then the fields."""
        derived = {
            "bits_per_byte": self.bits_per_byte,
            "bits_per_character": self.bits_per_character,
            "bits_per_token": self.bits_per_token,
            "perplexity": self.perplexity,
            "perplexity_per_word": self.perplexity_per_word,
            "loss": self.loss,
        }
        return {name: value for name, value in derived.items() if math.isfinite(value)} | asdict(self)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _per(amount: float, count: int) -> float:
    """Infinite if the text is too short to have one."""
    return amount / count if count else math.inf
