"""A corpus in segments of equal length that are read in random order, B at a time and block by block.

What is read one after the other in a corpus is alike, a file or an article after its neighbour, and so are
the gradients of a few lanes that read on and on. Segments mix everything within a epoch and are still long
enough to be remembered.

Shapes: B segments side by side (of this process), T tokens of a block.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from longspan.data.lanes import LanePosition, TokenBlock, as_block, check_fits


class Segments:
    """A walk like that of `Lanes`, whose position it uses: `offset` counts columns over all segments.

    Every epoch cuts the text at other places and shuffles the segments; seed and epoch decide how. B segments
    begin and end together. Fewer than B + 1 segments are left out of an epoch.
    """

    start = LanePosition()

    def __init__(
        self,
        tokens: npt.NDArray[Any],
        batch_size: int,
        block_length: int,
        segment_length: int,
        *,
        at_end: Literal["restart", "stop"] = "restart",
        seed: int = 0,
        rows: range | None = None,
    ) -> None:
        """`segment_length` is a multiple of `block_length`; a position may come from blocks of another."""
        check_fits(tokens, batch_size, segment_length, unit="segment")
        self._tokens = np.asarray(tokens)  # plain slices of a memory map are cheaper than its own
        self._batch_size, self._block_length, self._length = batch_size, block_length, segment_length
        self._at_end = at_end
        self._seed = seed
        self._rows = range(batch_size) if rows is None else rows
        self._begins_of = lru_cache(maxsize=1)(self._draw_begins)

    def next(self, position: LanePosition) -> TokenBlock | None:
        """The block at `position`; nothing when the walk stops at the end and is there."""
        offset, epoch = position.offset, position.epoch
        if offset % self._length % self._block_length:  # what is left of the segment is no whole blocks
            offset += self._length - offset % self._length
        if offset // self._length >= len(self._begins_of(epoch)):
            if self._at_end == "stop":
                return None
            offset, epoch = 0, epoch + 1
        group, column = divmod(offset, self._length)
        begins_B = self._begins_of(epoch)[group] + column
        return as_block(
            [self._tokens[begin : begin + self._block_length + 1] for begin in begins_B[self._rows]],
            begins=column == 0,
            position=LanePosition(position.blocks + 1, offset + self._block_length, epoch),
        )

    def _draw_begins(self, epoch: int) -> npt.NDArray[np.int64]:
        """Where the segments of a epoch begin, B in a row."""
        draw = random.Random(f"{self._seed}/{epoch}")
        spare = len(self._tokens) - 1 - self._batch_size * self._length
        shift = draw.randrange(min(self._length, spare + 1))
        order = list(range((len(self._tokens) - 1 - shift) // self._length))
        draw.shuffle(order)
        groups = len(order) // self._batch_size
        return shift + self._length * np.array(order[: groups * self._batch_size]).reshape(groups, -1)
