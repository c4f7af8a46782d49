"""How figures are shown, and what has to be said beside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan.data import Tokenizer

_LONG = 1e6  # from here on nobody reads the digits


def perplexity(value: float) -> str:
    """Three decimals; absurd ones as 3.08e+30."""
    return f"{value:,.3f}" if value < _LONG else f"{value:.2e}"


def lost_text(tokenizer: Tokenizer, counts: Iterable[tuple[int, int]]) -> list[str]:
    """What to know of bits per byte where a tokenizer lost text; of each text its `<unk>`s and all tokens."""
    notes = [
        f"{unknown:,} of {tokens:,} tokens are <unk>: "
        "bits per byte counts their text but not what it would take to tell it"
        for unknown, tokens in counts
        if unknown
    ]
    if tokenizer.lowercase:
        notes.append("the text is in lower case: bits per byte does not count what upper case would take")
    return notes
