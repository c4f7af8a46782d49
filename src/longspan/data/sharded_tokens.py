"""Several memory-mapped files of tokens that are read as one array."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt


class ShardedTokens:
    """What readers of tokens need of an array: a length, a dtype, and slices without a step.

    A slice of one file is a view. Only a slice across files is copied, so long ones should be read in chunks.
    """

    def __init__(self, shards: Sequence[npt.NDArray[Any]]) -> None:
        self._shards = [np.asarray(shard) for shard in shards]
        self._ends = list(accumulate(map(len, shards)))
        self.dtype = self._shards[0].dtype

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, wanted: slice) -> npt.NDArray[Any]:
        start, stop, step = wanted.indices(len(self))
        if step != 1:
            raise ValueError("tokens in several files have no slices with a step")
        parts = [self._shards[0][:0]]
        number = bisect_right(self._ends, start)
        while start < stop:
            begin = self._ends[number] - len(self._shards[number])
            end = min(stop, self._ends[number])
            parts.append(self._shards[number][start - begin : end - begin])
            start, number = end, number + 1
        return parts[-1] if len(parts) <= 2 else np.concatenate(parts)

    def __array__(self, *args: Any, **kwargs: Any) -> npt.NDArray[Any]:
        raise TypeError("tokens in several files may be larger than memory: read slices of them")
