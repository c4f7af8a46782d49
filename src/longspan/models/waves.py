"""Pipelines the blocks of a stack over pieces of the text, each block on its own CUDA stream.

An LSTM leaves most of a GPU idle: one token is little work, and the next token needs its result. So a block
of tokens is cut into pieces, and while one layer reads a piece, the layer above it reads the previous piece.
The backward pass overlaps in the same way: autograd runs it on the streams of the forward pass.
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
    """The same outputs and states as running the blocks in order."""
    length = h_BTD.shape[1]
    # Contiguous like any other block of tokens, so that compiled blocks are not compiled again.
    pieces = [piece_BTD.contiguous() for piece_BTD in h_BTD.split(-(-length // num_pieces), dim=1)]
    streams = _Streams(h_BTD.device, blocks) if h_BTD.is_cuda else None
    readings: list[Reading] = []
    after = list(states)
    for wave in range(len(pieces) + len(blocks) - 1):
        # The last block first: its stream then waits only for the work of earlier waves.
        for number in reversed(range(len(blocks))):
            place = wave - number
            if not 0 <= place < len(pieces):
                continue
            with streams.turn(number, pieces[place]) if streams else nullcontext():
                if place == 0:
                    readings.append(_begin(blocks[number], states[number], length))
                pieces[place] = readings[number].read(pieces[place])
                if place == len(pieces) - 1:
                    after[number] = readings[number].end()
    if streams is not None:
        streams.join([*pieces, *(leaf for state in after for leaf in state.flatten().values())])
    return torch.cat(pieces, dim=1), after


def _begin(block: Block, state: State, length: int) -> Reading:
    return block.begin(state, length) if isinstance(block, ReadsInPieces) else PlainReading(block, state)


class _Streams:
    """A CUDA stream for every block.

    `record_stream` marks a tensor that another stream reads, so that its memory is not reused too early.
    """

    def __init__(self, device: torch.device, blocks: Sequence[Block]) -> None:
        self.main = torch.cuda.current_stream(device)
        # LSTMs have priority: everything waits for them, and they start only when many SMs are free.
        self.streams = [
            _stream(device, number, priority=-1 if isinstance(block, LSTMBlock) else 0)
            for number, block in enumerate(blocks)
        ]
        for stream in self.streams:
            stream.wait_stream(self.main)

    @contextmanager
    def turn(self, number: int, h_BTD: Tensor) -> Iterator[None]:
        """Run on the stream of block `number`, after the previous block has computed h_BTD."""
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
    """Streams are reused, because torch caches memory per stream."""
    return torch.cuda.Stream(device, priority=priority)
