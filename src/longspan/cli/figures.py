"""Printing scores, and the notes that belong to them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longspan.data import Tokenizer

SCORED = ("valid", "test")  # the splits that are scored at the end of a run
_LONG = 1e6  # larger values are printed with an exponent
_MANY_UNKNOWN = 0.1  # from this share of unknown tokens on, a score comes with a warning
_LETTERS = {"byte", "character", "symbols"}  # forms of tokenizers whose perplexity is not shown


def perplexity(value: float) -> str:
    """Three decimals; large values as 3.08e+30."""
    return f"{value:,.3f}" if value < _LONG else f"{value:.2e}"


def lanes(number: int) -> str:
    return "1 lane" if number == 1 else f"{number:,} lanes"


def final_figures(final: dict[str, Any], tokenizer: Tokenizer) -> list[str]:
    """The scores of a finished run, from the last line of its metrics, with notes."""
    lines: list[str] = []
    for split in SCORED:
        score = final[split]
        measure, size = _bits(score)
        lines.append(f"{measure} on the {split} split ({size}; weights of step {final['step']:,})")
        if tokenizer.form not in _LETTERS:
            kinds = {"perplexity": "token", "perplexity_per_word": "word"}  # only finite values are present
            shown = [f"{perplexity(score[key])} per {kind}" for key, kind in kinds.items() if key in score]
            lines.append(f"perplexity     {', '.join(shown)} on the {split} split")
    counts = [(final[split]["unknown"], final[split]["tokens"]) for split in SCORED]
    for unknown, tokens in counts:
        lines += [f"warning        {warning}" for warning in meaningless(0.0, unknown, tokens)]
    return lines + [f"note           {note}" for note in lost_text(tokenizer, counts)]


def _bits(score: dict[str, Any]) -> tuple[str, str]:
    """Bits per byte, or per token where the text of the tokens is unknown, and the amount that was scored."""
    if "bytes" not in score:
        return f"bits per token {score['bits_per_token']:.4f}", f"{score['tokens']:,} tokens"
    return (
        f"bits per byte  {score['bits_per_byte']:.4f}",
        f"{score['tokens']:,} tokens, {score['bytes']:,} bytes",
    )


def meaningless(nats: float, unknown: int, tokens: int) -> list[str]:
    """Why a score says little or nothing about a text; empty for an ordinary score."""
    if not math.isfinite(nats):
        return ["the loss is not finite: the score means nothing"]
    if tokens and unknown >= _MANY_UNKNOWN * tokens:
        return [
            f"{unknown:,} of {tokens:,} tokens ({unknown / tokens:.0%}) are unknown to the vocabulary: "
            "the score says little about this text"
        ]
    return []


def lost_text(tokenizer: Tokenizer, counts: Iterable[tuple[int, int]]) -> list[str]:
    """Notes on bits per byte if the tokenizer lost text; `counts` has (`<unk>`, all tokens) per text."""
    if not tokenizer.knows_text:
        return ["the text of the tokens is unknown, so there are no bits per byte"]
    notes = [
        f"{unknown:,} of {tokens:,} tokens are <unk>: "
        "bits per byte counts their bytes, but not the bits to predict them"
        for unknown, tokens in counts
        if unknown
    ]
    if tokenizer.lowercase:
        notes.append("the text is in lower case: bits per byte does not count the bits of upper case")
    return notes
