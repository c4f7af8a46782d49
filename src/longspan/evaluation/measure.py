"""How much text a part of a token file stands for: the denominators of bits per byte and per character."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from longspan.data import TokenFile, Tokenizer
    from longspan.evaluation.protocols import Walk

# Text is decoded in pieces. A piece is decoded together with a few tokens before it, whose own size is then
# taken off: so blanks between words, and characters cut in two, are counted once.
PIECE = 1 << 16
CONTEXT = 8


def scored_text(token_file: TokenFile, tokenizer: Tokenizer, walk: Walk) -> tuple[int, int]:
    """Bytes and characters of the text that the scored tokens of `walk` stand for.

    The file knows the exact size of its whole text; the smaller of the two parts, scored or skipped, is
    decoded and measured. What a tokenizer loses (case, double blanks, unknown words) shows only in the whole.
    """
    scored = [(lane.start + 1, lane.start + 1 + lane.length) for lane in walk.lanes]
    skipped = list(_gaps(scored, len(token_file)))
    few_skipped = walk.tokens > len(token_file) // 2
    runs = skipped if few_skipped else scored
    in_runs = sum(stop - start for start, stop in runs)
    num_bytes = num_characters = 0
    for start, stop in runs:
        more_bytes, more_characters = _size(tokenizer, token_file.tokens, start, stop)
        num_bytes += more_bytes
        num_characters += more_characters
    if len(token_file) == token_file.num_bytes:  # one token per byte: no need to guess at broken characters
        num_bytes = in_runs
    if few_skipped:
        return token_file.num_bytes - num_bytes, token_file.num_characters - num_characters
    return num_bytes, num_characters


def _gaps(runs: list[tuple[int, int]], end: int) -> Iterator[tuple[int, int]]:
    """What lies between `runs`, which are in order, and before and after them."""
    here = 0
    for start, stop in [*runs, (end, end)]:
        if start > here:
            yield here, start
        here = stop


def _size(tokenizer: Tokenizer, tokens: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    num_bytes = num_characters = 0
    for begin in range(start, stop, PIECE):
        end = min(begin + PIECE, stop)
        before = max(0, begin - CONTEXT)
        whole = tokenizer.decode(tokens[before:end].tolist())
        context = tokenizer.decode(tokens[before:begin].tolist())
        num_bytes += len(whole.encode()) - len(context.encode())
        num_characters += len(whole) - len(context)
    return num_bytes, num_characters
