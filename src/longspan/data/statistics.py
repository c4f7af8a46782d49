"""Statistics of tokens without context."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_CHUNK_TOKENS = 1 << 22


def count_tokens(tokens: npt.NDArray[Any], vocabulary_size: int) -> npt.NDArray[np.int64]:
    """How often each token occurs; a memory-mapped array is read in chunks."""
    counts = np.zeros(vocabulary_size, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        counts += np.bincount(tokens[start : start + _CHUNK_TOKENS], minlength=vocabulary_size)
    return counts


def order_0_entropy(tokens: npt.NDArray[Any]) -> float:
    """Bits per token of the best code without context: an upper bound for a useful model."""
    counts = count_tokens(tokens, int(tokens.max()) + 1)
    shares = counts[counts > 0] / len(tokens)
    return float((shares * np.log2(1 / shares)).sum())
