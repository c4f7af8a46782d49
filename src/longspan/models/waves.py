"""Blocks that read at the same time, each a piece of the text behind the one before it.

On a GPU an LSTM mostly waits for itself: a token is little work, and the next one needs its result. So a text
is cut into pieces, and while one layer reads a piece, the layer above it reads the piece before. Gradients
flow back the same way: autograd runs the backward pass of an operation on the stream of its forward pass.
Shapes: B batch, T block, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

from longspan.layers.block import Block
from longspan.layers.lstm import LSTMBlock
from longspan.layers.reading import PlainReading, Reading, ReadsInPieces
from longspan.state import State


def in_waves(
    blocks: Sequence[Block], h_BTD: Tensor, states: Sequence[State], num_pieces: int
) -> tuple[Tensor, list[State]]:
    """What the blocks give one after the other."""
    length = h_BTD.shape[1]
    # In memory a piece is like any other block of text: compiled blocks are compiled once for both.
    pieces = [piece_BTD.contiguous() for piece_BTD in h_BTD.split(-(-length // num_pieces), dim=1)]
    contiguous_split = _ContiguousSplit(h_BTD.device, blocks) if h_BTD.is_cuda else None
    readings: list[Reading] = []
    after = list(states)
    for wave in range(len(pieces) + len(blocks) - 1):
        # The last block first: the one before it has then been given nothing yet that it need not wait for.
        for number in reversed(range(len(blocks))):
            place = wave - number
            if not 0 <= place < len(pieces):
                continue
            with contiguous_split.turn(number, pieces[place]) if contiguous_split else nullcontext():
                if place == 0:
                    readings.append(_begin(blocks[number], states[number], length))
                pieces[place] = readings[number].read(pieces[place])
                if place == len(pieces) - 1:
                    after[number] = readings[number].end()
    if contiguous_split is not None:
        contiguous_split.join([*pieces, *(leaf for state in after for leaf in state.flatten().values())])
    return torch.cat(pieces, dim=1), after


def _begin(block: Block, state: State, length: int) -> Reading:
    return block.begin(state, length) if isinstance(block, ReadsInPieces) else PlainReading(block, state)


class _ContiguousSplit:
    """Every block on a stream of its own.

    A tensor that another stream reads is recorded there: its memory must not be used again before.
    """

    def __init__(self, device: torch.device, blocks: Sequence[Block]) -> None:
        self.main = torch.cuda.current_stream(device)
        # LSTMs go first: everything waits for them, and they start only where many multiprocessors are free.
        self.streams = [
            _stream(device, number, priority=-1 if isinstance(block, LSTMBlock) else 0)
            for number, block in enumerate(blocks)
        ]
        for stream in self.streams:
            stream.wait_stream(self.main)

    @contextmanager
    def turn(self, number: int, h_BTD: Tensor) -> Iterator[None]:
        """To read what the block before has given."""
        stream = self.streams[number]
        if number > 0:
            stream.wait_stream(self.streams[number - 1])
        h_BTD.record_stream(stream)
        with torch.cuda.stream(stream):
            yield

    def join(self, tensors: Sequence[Tensor]) -> None:
        for stream in self.streams:
            self.main.wait_stream(stream)
        for tensor in tensors:
            tensor.record_stream(self.main)


@cache
def _stream(device: torch.device, number: int, priority: int) -> torch.cuda.Stream:
    """Always the same: memory that a stream has used is kept for that stream."""
    return torch.cuda.Stream(device, priority=priority)
