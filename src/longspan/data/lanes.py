"""B contiguous streams through a corpus, read block by block side by side.

The stream is cut to a multiple of B and laid out as B rows of N tokens; a block is columns p to p+T-1 as
inputs and p+1 to p+T as targets. What is never a target: the remainder of the cut (fewer than B tokens)
and the first token of each row, which nothing precedes.

Shapes: B lanes (of this process), T tokens of a block.
"""

from __future__ import annotations

import random
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.errors import UserError


@dataclass(frozen=True)
class LanePosition:
    """Where all lanes stand: everything the next block depends on besides the lanes themselves."""

    blocks: int = 0  # read so far
    offset: int = 0  # columns of the current epoch that have been read
    epoch: int = 0  # times the end was reached


@dataclass(frozen=True)
class TokenBlock:
    """T tokens of every lane, and what follows each of them."""

    tokens_BT: Tensor
    targets_BT: Tensor
    begins: bool  # nothing before this block is its context: reset the carried state first
    position: LanePosition  # where the next block is


class BlockSource(Protocol):
    """What gives the blocks of a run: it is told a position and returns the block there, or nothing."""

    def next(self, position: LanePosition) -> TokenBlock | None: ...


class Lanes:
    """A walk through tokens; it keeps no place of its own, `next` is given one and returns the next.

    With `at_end="restart"` every block is whole: when the next one would not fit, the walk begins again at
    a random offset below the block length. With `at_end="stop"` the last block may be shorter.
    Random draws are a function of the seed and the position, so a position is all a checkpoint needs.
    `rows` are the lanes this process reads; all processes share a batch size, a seed and positions.
    """

    start = LanePosition()

    def __init__(
        self,
        tokens: npt.NDArray[Any],
        batch_size: int,
        block_length: int,
        *,
        jitter: bool = False,
        at_end: Literal["restart", "stop"] = "restart",
        seed: int = 0,
        rows: range | None = None,
    ) -> None:
        self._tokens = np.asarray(tokens)  # plain slices of a memory map are cheaper than its own
        self._lane_length = len(tokens) // batch_size
        self._block_length = block_length
        self._jitter = jitter
        self._at_end = at_end
        self._seed = seed
        self._rows = range(batch_size) if rows is None else rows
        check_fits(tokens, batch_size, block_length)

    def next(self, position: LanePosition) -> TokenBlock | None:
        """The block at `position`; nothing when the walk stops at the end and is there."""
        draw = random.Random(f"{self._seed}/{position.blocks}")
        offset, epoch = position.offset, position.epoch
        room = self._lane_length - self._block_length
        if self._at_end == "restart" and offset >= room:
            # as the adaptive-span original: anywhere in the first block, if the lane is that long
            offset, epoch = draw.randrange(min(self._block_length, room)), epoch + 1
        length = min(self._draw_length(draw), self._lane_length - 1 - offset)
        if length <= 0:
            return None
        lanes = [row * self._lane_length + offset for row in self._rows]
        return as_block(
            [self._tokens[begin : begin + length + 1] for begin in lanes],
            begins=position.blocks == 0 or epoch > position.epoch,
            position=LanePosition(position.blocks + 1, offset + length, epoch),
        )

    def _draw_length(self, draw: random.Random) -> int:
        """SHA-RNN's rule: about a block length, now and then about half of one."""
        if not self._jitter:
            return self._block_length
        base = self._block_length if draw.random() < 0.95 else self._block_length / 2
        return min(max(5, int(draw.gauss(base, 5))), self._block_length)


def as_block(texts: Sequence[npt.NDArray[Any]], *, begins: bool, position: LanePosition) -> TokenBlock:
    """Of T + 1 tokens of every lane."""
    both = np.empty((len(texts), len(texts[0])), dtype=np.int64)
    for row, text in zip(both, texts, strict=True):
        row[:] = text
    block = torch.from_numpy(both)
    return TokenBlock(block[:, :-1].contiguous(), block[:, 1:].contiguous(), begins, position)


def check_fits(tokens: Sized, batch_size: int, length: int, unit: str = "block") -> None:
    """A `UserError` unless every lane holds one block, or other unit, and the token after it."""
    needed = batch_size * (length + 1)
    if len(tokens) < needed:
        raise UserError(
            f"the text has {len(tokens):,} tokens; one {unit} of {batch_size} lanes x {length} tokens "
            f"needs {needed:,}: use more text, a smaller batch_size or a smaller {unit}_length"
        )
