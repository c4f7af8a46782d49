"""Blocks that read a text chunk by chunk (`models/pipeline.py`). Shapes: B batch, T chunk, D width."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from longspan.layers.block import Block
from longspan.state import State


class ChunkReader(ABC):
    """Reads the chunks of one text in order. What all chunks need is prepared once."""

    @abstractmethod
    def read(self, h_BTD: Tensor) -> Tensor:
        """The output of the block for the next chunk."""

    @abstractmethod
    def end(self) -> State:
        """The state of the block after the last chunk."""


class ReadsChunks(Block):
    """A block that prepares something for the whole text, or must know its length."""

    @abstractmethod
    def begin(self, state: State, length: int) -> ChunkReader:
        """A reader for a text of `length` tokens."""


class PlainReader(ChunkReader):
    """The reader of any other block: a chunk is a block of tokens like any other."""

    def __init__(self, block: Block, state: State) -> None:
        self.block, self.state = block, state

    def read(self, h_BTD: Tensor) -> Tensor:
        out_BTD: Tensor
        out_BTD, self.state = self.block(h_BTD, self.state)
        return out_BTD

    def end(self) -> State:
        return self.state
