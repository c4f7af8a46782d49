"""A pipeline of blocks on a GPU: each block has its own CUDA stream and is one chunk behind the block below.

An LSTM uses little of a GPU: a step is small and depends on the step before. So the text is split into
chunks, and while one layer reads a chunk, the layer above reads the chunk before it. The backward pass has
the same order: autograd runs the backward pass of an operation on the stream of its forward pass.
Shapes: B batch, T block, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

from longspan.layers.block import Block
from longspan.layers.chunks import ChunkReader, PlainReader, ReadsChunks
from longspan.layers.lstm import LSTMBlock
from longspan.state import State


def pipelined(
    blocks: Sequence[Block], h_BTD: Tensor, states: Sequence[State], num_chunks: int
) -> tuple[Tensor, list[State]]:
    """The output of the last block and the states of all, as if the blocks ran one after the other."""
    length = h_BTD.shape[1]
    # Contiguous, as a whole block of text is: compiled code is compiled once for both.
    chunks = [chunk_BTD.contiguous() for chunk_BTD in h_BTD.split(-(-length // num_chunks), dim=1)]
    streams = _Streams(h_BTD.device, blocks) if h_BTD.is_cuda else None
    readers: list[ChunkReader] = []
    after = list(states)
    for tick in range(len(chunks) + len(blocks) - 1):
        # Upper blocks first: their stream then waits only for what the block below did in earlier ticks.
        for number in reversed(range(len(blocks))):
            chunk = tick - number
            if not 0 <= chunk < len(chunks):
                continue
            with streams.use(number, chunks[chunk]) if streams else nullcontext():
                if chunk == 0:
                    readers.append(_reader(blocks[number], states[number], length))
                chunks[chunk] = readers[number].read(chunks[chunk])
                if chunk == len(chunks) - 1:
                    after[number] = readers[number].end()
    if streams is not None:
        streams.join([*chunks, *(leaf for state in after for leaf in state.flatten().values())])
    return torch.cat(chunks, dim=1), after


def _reader(block: Block, state: State, length: int) -> ChunkReader:
    return block.begin(state, length) if isinstance(block, ReadsChunks) else PlainReader(block, state)


class _Streams:
    """One CUDA stream per block.

    A tensor that another stream reads is recorded there: the allocator must not reuse its memory before.
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
    def use(self, number: int, h_BTD: Tensor) -> Iterator[None]:
        """Run on the stream of a block, after the block below has made `h_BTD`."""
        stream = self.streams[number]
        if number > 0:
            stream.wait_stream(self.streams[number - 1])
        h_BTD.record_stream(stream)
        with torch.cuda.stream(stream):
            yield

    def join(self, tensors: Sequence[Tensor]) -> None:
        """Let the main stream wait for all blocks, and use these tensors."""
        for stream in self.streams:
            self.main.wait_stream(stream)
        for tensor in tensors:
            tensor.record_stream(self.main)


@cache
def _stream(device: torch.device, number: int, priority: int) -> torch.cuda.Stream:
    """The same in every step: the allocator keeps memory per stream."""
    return torch.cuda.Stream(device, priority=priority)
