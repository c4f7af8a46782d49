"""Statistics of tokens without context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_CHUNK_TOKENS = 1 << 22


def count_tokens(tokens: npt.NDArray[Any], vocabulary_size: int) -> npt.NDArray[np.int64]:
    """How often each token occurs; a memory-mapped array is read in chunks."""
    counts = np.zeros(vocabulary_size, dtype=np.int64)
    for chunk in _chunks(tokens):
        counts += np.bincount(chunk, minlength=vocabulary_size)
    return counts


def order_0_entropy(tokens: npt.NDArray[Any]) -> float:
    """Bits per token of the best code without context: an upper bound for a useful model."""
    highest = max(int(chunk.max()) for chunk in _chunks(tokens))
    counts = count_tokens(tokens, highest + 1)
    shares = counts[counts > 0] / len(tokens)
    return float((shares * np.log2(1 / shares)).sum())


def _chunks(tokens: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        yield tokens[start : start + _CHUNK_TOKENS]
