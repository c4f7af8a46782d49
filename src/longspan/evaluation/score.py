"""The result of an evaluation, with everything that is needed to interpret it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from longspan.evaluation.by_position import PositionLoss


@dataclass(frozen=True, kw_only=True)
class Score:
    """Nats over the scored tokens, and the denominators that turn them into the usual figures.

    `bytes`, `characters` and `words` measure the raw text of the scored tokens. Words are separated by
    whitespace, and the end of a line counts as a word. Figures over them can be compared across tokenizers
    that lose nothing. With a tokenizer that loses text, by lower case or by `<unk>` (`unknown` counts these
    tokens), the figures are too low: lost text is in the denominator, but the model does not predict it.
    If a model was given tokens and the text is unknown, the three are None, and the figures over them are
    NaN; `figures` leaves them out.
    `divisor` is what the protocol divides by: the number of tokens scored, except under `sha-rnn`.
    A figure too large for a float is infinite.
    `memory` is False if every block started from an empty state. `by_position` is None if it was not asked
    for; its nats and tokens sum to exactly `nats` and `tokens`.
    """

    nats: float
    tokens: int
    divisor: int
    bytes: int | None
    characters: int | None
    words: int | None
    unknown: int
    skipped: int
    skipped_because: str
    protocol: str
    batch_size: int
    block_length: int
    memory: bool = True
    by_position: tuple[PositionLoss, ...] | None = None

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
        """All finite figures, then the values they were computed from, as JSON values."""
        derived = {
            "bits_per_byte": self.bits_per_byte,
            "bits_per_character": self.bits_per_character,
            "bits_per_token": self.bits_per_token,
            "perplexity": self.perplexity,
            "perplexity_per_word": self.perplexity_per_word,
            "loss": self.loss,
        }
        known = {name: value for name, value in asdict(self).items() if value is not None}
        if self.memory:
            del known["memory"]  # the usual case
        if self.by_position is not None:
            known["by_position"] = [
                {"position": entry.first, "tokens": entry.tokens, "nats": entry.nats, "loss": entry.loss}
                for entry in self.by_position
            ]
        return {name: value for name, value in derived.items() if math.isfinite(value)} | known


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _per(amount: float, count: int | None) -> float:
    """Infinite if the text is shorter than one word, NaN if the text is unknown."""
    if count is None:
        return math.nan
    return amount / count if count else math.inf
