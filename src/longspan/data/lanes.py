"""B contiguous streams through a corpus, read in parallel, block by block.

The tokens are truncated to a multiple of B and arranged as B rows of N tokens. A block is columns p to p+T-1
as inputs and p+1 to p+T as targets. Never a target: the truncated rest (fewer than B tokens) and the first
token of each row, which has no predecessor.

Shapes: B lanes (of this process), T tokens of a block.
"""

from __future__ import annotations

import random
from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.data.sharded_tokens import ShardedTokens
from longspan.errors import UserError


@dataclass(frozen=True)
class LanePosition:
    """The position of all lanes: with the lanes, it determines the next block."""

    blocks: int = 0  # read so far
    offset: int = 0  # columns of the current epoch that have been read
    epoch: int = 0  # times the end was reached


@dataclass(frozen=True)
class TokenBlock:
    """T tokens of every lane, and the next token of each of them."""

    tokens_BT: Tensor
    targets_BT: Tensor
    begins: bool  # the block has no context: reset the carried state first
    position: LanePosition  # where the next block is


class BlockSource(Protocol):
    """What gives the blocks of a run: it is told a position and returns the block there, or nothing."""

    def next(self, position: LanePosition) -> TokenBlock | None: ...

    def epoch_length(self, epoch: int) -> float:
        """Columns in this epoch; infinite if nobody knows."""
        ...


class Lanes:
    """Reads tokens in B lanes. It stores no position: `next` takes one and returns the next one.

    With `at_end="restart"` every block is full: if the next one does not fit, reading starts again at a
    random offset below the block length. With `at_end="stop"` the last block may be shorter.
    Random draws are a function of the seed and the position, so a checkpoint needs only the position.
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
        self._tokens = cheap_to_slice(tokens)
        self._lane_length = len(tokens) // batch_size
        self._block_length = block_length
        self._jitter = jitter
        self._at_end = at_end
        self._seed = seed
        self._rows = range(batch_size) if rows is None else rows
        check_fits(tokens, batch_size, block_length)

    def next(self, position: LanePosition) -> TokenBlock | None:
        """The block at `position`; None at the end with `at_end="stop"`."""
        draw = random.Random(f"{self._seed}/{position.blocks}")
        offset, epoch = position.offset, position.epoch
        last_offset = self._lane_length - self._block_length
        if self._at_end == "restart" and offset >= last_offset:
            # as in the adaptive-span original: anywhere in the first block, if the lane is long enough
            offset, epoch = draw.randrange(min(self._block_length, last_offset)), epoch + 1
        length = min(self._draw_length(draw), self._lane_length - 1 - offset)
        if length <= 0:
            return None
        lanes = [row * self._lane_length + offset for row in self._rows]
        return as_block(
            [self._tokens[begin : begin + length + 1] for begin in lanes],
            begins=position.blocks == 0 or epoch > position.epoch,
            position=LanePosition(position.blocks + 1, offset + length, epoch),
        )

    def epoch_length(self, epoch: int) -> int:
        """Columns in an epoch."""
        return self._lane_length - 1

    def _draw_length(self, draw: random.Random) -> int:
        """SHA-RNN's rule: about a block length, sometimes about half of it."""
        if not self._jitter:
            return self._block_length
        base = self._block_length if draw.random() < 0.95 else self._block_length / 2
        return min(max(5, int(draw.gauss(base, 5))), self._block_length)


class SomeLanes:
    """The rows of this process, of blocks that another source gives for all lanes."""

    def __init__(self, source: BlockSource, rows: range) -> None:
        self._source, self._rows = source, slice(rows.start, rows.stop)

    def next(self, position: LanePosition) -> TokenBlock | None:
        block = self._source.next(position)
        if block is None:
            return None
        return replace(block, tokens_BT=block.tokens_BT[self._rows], targets_BT=block.targets_BT[self._rows])

    def epoch_length(self, epoch: int) -> float:
        return self._source.epoch_length(epoch)


def cheap_to_slice(tokens: Any) -> Any:
    """The same tokens: slices of a plain array are cheaper than those of a memory map."""
    return tokens if isinstance(tokens, ShardedTokens) else np.asarray(tokens)


def as_block(texts: Sequence[npt.NDArray[Any]], *, begins: bool, position: LanePosition) -> TokenBlock:
    """A block from T + 1 tokens of every lane."""
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
