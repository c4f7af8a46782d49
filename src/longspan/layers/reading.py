"""A text that a block reads in pieces. Shapes: B batch, T piece, D width."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from longspan.layers.block import Block
from longspan.state import State


class Reading(ABC):
    """The pieces of one text, one after the other: what all of them need is prepared once."""

    @abstractmethod
    def read(self, h_BTD: Tensor) -> Tensor:
        """What the block gives for the next piece."""

    @abstractmethod
    def end(self) -> State:
        """The state of the block after all pieces."""


class ReadsInPieces(Block):
    """A block that prepares something for a whole text, or has to know how long it is."""

    @abstractmethod
    def begin(self, state: State, length: int) -> Reading:
        """Start on a text of `length` tokens."""


class PlainReading(Reading):
    """Of a block to which a piece is like any other text."""

    def __init__(self, block: Block, state: State) -> None:
        self.block, self.state = block, state

    def read(self, h_BTD: Tensor) -> Tensor:
        out_BTD: Tensor
        out_BTD, self.state = self.block(h_BTD, self.state)
        return out_BTD

    def end(self) -> State:
        return self.state
