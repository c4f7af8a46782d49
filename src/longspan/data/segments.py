"""A corpus in segments of equal length, read in random order, B at a time and block by block.

Adjacent text in a corpus is similar, and so are the gradients of a few lanes that read it in order. Segments
mix the text within an epoch and are still long enough for the memory.

Shapes: B segments in parallel (of this process), T tokens of a block.
"""

from __future__ import annotations

import random
from array import array
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from longspan.data.lanes import LanePosition, TokenBlock, as_block, cheap_to_slice, check_fits


class Segments:
    """Reads tokens like `Lanes`, with the same position: `offset` counts columns over all segments.

    Every epoch cuts the text at other offsets and shuffles the segments, depending on seed and epoch. B
    segments begin and end together. Fewer than B + 1 segments are left out of an epoch.
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
        """`segment_length` is a multiple of `block_length`; a position may be of another block length."""
        check_fits(tokens, batch_size, segment_length, unit="segment")
        self._tokens = cheap_to_slice(tokens)
        self._batch_size, self._block_length, self._length = batch_size, block_length, segment_length
        self._at_end = at_end
        self._seed = seed
        self._rows = range(batch_size) if rows is None else rows
        self._begins_of = lru_cache(maxsize=1)(self._draw_begins)

    def next(self, position: LanePosition) -> TokenBlock | None:
        """The block at `position`; None at the end with `at_end="stop"`."""
        offset, epoch = position.offset, position.epoch
        if (
            offset % self._length % self._block_length
        ):  # the rest of the segment is not a multiple of the block
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

    def epoch_length(self, epoch: int) -> int:
        """Columns in an epoch."""
        return len(self._begins_of(epoch)) * self._length

    def _draw_begins(self, epoch: int) -> npt.NDArray[np.int64]:
        """The first tokens of the segments of an epoch, B per row."""
        draw = random.Random(f"{self._seed}/{epoch}")
        spare = len(self._tokens) - 1 - self._batch_size * self._length
        shift = draw.randrange(min(self._length, spare + 1))
        # An array, since a list of a large text's segments would take several times the memory.
        order = array("q", range((len(self._tokens) - 1 - shift) // self._length))
        draw.shuffle(order)
        groups = len(order) // self._batch_size
        begins = np.array(order, dtype=np.int64)[: groups * self._batch_size].reshape(groups, -1)
        begins *= self._length
        begins += shift
        return begins
