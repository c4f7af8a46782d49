"""What a stream of tokens is worth without any context."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_CHUNK_TOKENS = 1 << 22


def order_0_entropy(tokens: npt.NDArray[Any]) -> float:
    """Bits per token of the best code that ignores context; a model has to do better."""
    counts = np.zeros(int(tokens.max()) + 1)
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        here = np.bincount(tokens[start : start + _CHUNK_TOKENS])
        counts[: len(here)] += here
    shares = counts[counts > 0] / len(tokens)
    return float(-(shares * np.log2(shares)).sum())
