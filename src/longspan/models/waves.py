"""Blocks that read at the same time, each a piece of the text behind the one before it.

On a GPU an LSTM mostly waits for itself: a token is little work, and the next one needs its result. So a text
is cut into pieces, and while one layer reads a piece, the layer above it reads the piece before. Gradients
flow back the same way: autograd runs the backward pass of an operation on the stream of its forward pass.
Shapes: B batch, T block, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from longspan.layers.block import Block
from longspan.state import State


def in_waves(
    blocks: Sequence[Block], h_BTD: Tensor, states: Sequence[State], num_pieces: int
) -> tuple[Tensor, list[State]]:
    """What the blocks give one after the other, if to none of them it matters how a text is cut."""
    if len(blocks) == 1:
        h_BTD, state = blocks[0](h_BTD, states[0])
        return h_BTD, [state]
    after = list(states)
    length = -(-h_BTD.shape[1] // num_pieces)
    # In memory a piece is like any other block of text: compiled blocks are compiled once for both.
    pieces = [piece_BTD.contiguous() for piece_BTD in h_BTD.split(length, dim=1)]
    side_by_side = _SideBySide(h_BTD.device, len(blocks)) if h_BTD.is_cuda else None
    for wave in range(len(pieces) + len(blocks) - 1):
        # The last block first: the one before it has then been given nothing yet that it need not wait for.
        for number in reversed(range(len(blocks))):
            place = wave - number
            if 0 <= place < len(pieces):
                block, piece_BTD, state = blocks[number], pieces[place], after[number]
                if side_by_side is None:
                    pieces[place], after[number] = block(piece_BTD, state)
                else:
                    pieces[place], after[number] = side_by_side.read(number, block, piece_BTD, state)
    if side_by_side is not None:
        side_by_side.join([*pieces, *(leaf for state in after for leaf in state.flatten().values())])
    return torch.cat(pieces, dim=1), after


class _SideBySide:
    """Every block on a stream of its own.

    A tensor that another stream reads is recorded there: its memory must not be used again before.
    """

    def __init__(self, device: torch.device, num_blocks: int) -> None:
        self.main = torch.cuda.current_stream(device)
        self.streams = [_stream(device, number) for number in range(num_blocks)]
        for stream in self.streams:
            stream.wait_stream(self.main)

    def read(self, number: int, block: Block, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        stream = self.streams[number]
        if number > 0:
            stream.wait_stream(self.streams[number - 1])
        h_BTD.record_stream(stream)
        with torch.cuda.stream(stream):
            out_BTD, after = block(h_BTD, state)
        return out_BTD, after

    def join(self, tensors: Sequence[Tensor]) -> None:
        for stream in self.streams:
            self.main.wait_stream(stream)
        for tensor in tensors:
            tensor.record_stream(self.main)


@cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    """Always the same: memory that a stream has used is kept for that stream."""
    return torch.cuda.Stream(device)
