"""What an evaluation found, with everything that is needed to read the number rightly."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Score:
    """Nats over the scored tokens, and the denominators that turn them into the usual figures.

    `bytes` and `characters` measure the text that the scored tokens stand for. `divisor` is what the protocol
    divides by: the number of tokens scored, except under `sha-rnn`.
    """

    nats: float
    tokens: int
    divisor: int
    bytes: int
    characters: int
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
        """What papers on byte-level and character-level data call bits per character."""
        return self.loss / math.log(2)

    @property
    def perplexity(self) -> float:
        """Per token; infinite where the exponential leaves the range of numbers."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers: bits over the UTF-8 bytes of the scored text."""
        return self.nats / math.log(2) / self.bytes

    @property
    def bits_per_character(self) -> float:
        """Bits over the Unicode characters of the scored text."""
        return self.nats / math.log(2) / self.characters
