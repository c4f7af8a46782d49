"""The amount of raw text of the scored tokens: denominators of scores per byte, character and word.

A tokenizer may lose some of the text (case, double blanks, newlines, unknown words) or add to it. So a part
of the tokens gets a share of the raw text, in proportion to the text of its tokens. For a tokenizer that
loses nothing this is exact. For every tokenizer the parts of a text add up to the text.

Lost text is in the denominators too, but no model has to predict it. So scores with a tokenizer that loses
text are too low, compared with one that does not.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from longspan.data import count_tokens

if TYPE_CHECKING:
    from longspan.data import TokenArray, TokenFile, Tokenizer
    from longspan.evaluation.protocols import EvaluationPlan

_INSIDE_CHARACTERS = bytes(range(0x80, 0xC0))  # bytes of UTF-8 that begin no character
_CHUNK_TOKENS = 1 << 22
_BLANKS = string.whitespace.encode()


@dataclass(frozen=True)
class Extent:
    """An amount of raw text; None where tokens are all that is known."""

    bytes: int | None
    characters: int | None
    words: int | None


def scored_text(token_file: TokenFile | TokenArray, tokenizer: Tokenizer, plan: EvaluationPlan) -> Extent:
    """The raw text of the scored tokens of `plan`; words are counted in proportion to blanks."""
    if token_file.num_bytes is None or not tokenizer.knows_text:
        return Extent(None, None, None)
    pieces = tokenizer.pieces()
    every_V = count_tokens(token_file.tokens, len(pieces))
    scored_V = np.zeros_like(every_V)
    for tokens in _scored(token_file, plan):
        scored_V += count_tokens(tokens, len(pieces))

    bytes_V = np.array([len(piece) for piece in pieces])
    characters_V = np.array([len(piece.translate(None, delete=_INSIDE_CHARACTERS)) for piece in pieces])
    by_bytes = int(bytes_V @ scored_V), int(bytes_V @ every_V)
    blanks_V = bytes_V - np.array([len(piece.translate(None, delete=_BLANKS)) for piece in pieces])
    by_characters = int(characters_V @ scored_V), int(characters_V @ every_V)
    by_blanks = int(blanks_V @ scored_V), int(blanks_V @ every_V)
    return Extent(
        bytes=_share(token_file.num_bytes, *by_bytes),
        characters=_share(token_file.num_characters, *by_characters),
        words=_share(token_file.num_words, *(by_blanks if by_blanks[1] else by_bytes)),
    )


def scored_unknown(token_file: TokenFile | TokenArray, tokenizer: Tokenizer, plan: EvaluationPlan) -> int:
    """How many of the scored tokens are the vocabulary's `<unk>`."""
    if tokenizer.unknown_id is None:
        return 0
    return sum(int(np.count_nonzero(tokens == tokenizer.unknown_id)) for tokens in _scored(token_file, plan))


def _scored(token_file: TokenFile | TokenArray, plan: EvaluationPlan) -> Iterator[np.ndarray]:
    for lane in plan.lanes:
        first, last = lane.start + 1 + lane.warm, lane.start + 1 + lane.length
        every = plan.unscored_every or 1
        step = max(1, _CHUNK_TOKENS // every) * every  # a lane may be larger than memory
        for begin in range(first, last, step):
            tokens = token_file.tokens[begin : min(begin + step, last)]
            if plan.unscored_every is not None:
                tokens = np.delete(tokens, slice(every - 1, None, every))
            yield tokens


def _share(amount: int | None, part: int, whole: int) -> int | None:
    if amount is None:
        return None
    return round(amount * part / whole) if whole else 0
