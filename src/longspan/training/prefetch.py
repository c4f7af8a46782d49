"""Prefetch: a thread prepares the next block while a step runs. Shapes: B lanes, T block."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType

import torch
from torch import Tensor

from longspan.data import BlockSource, LanePosition, TokenBlock


class Prefetcher:
    """`next` of a block source, prefetched: while a step runs, a thread prepares the next block.

    For a GPU, blocks are in pinned memory and are copied asynchronously. A block that was not prefetched,
    such as the first after compile warm-up, is prepared on request. An exception in the thread is raised by
    the `next` call for its block. The thread ends when the context is left.
    """

    _source: BlockSource

    def __init__(self, most_tokens: int, device: torch.device) -> None:
        """`most_tokens` is the number of tokens of the largest block."""
        self._most_tokens = most_tokens
        self._pinned = device.type == "cuda"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._prefetched: tuple[LanePosition, Future[TokenBlock | None]] | None = None

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def follow(self, source: BlockSource) -> None:
        """Switch to another block source; a prefetched block is dropped, since block lengths may differ."""
        self._source, self._prefetched = source, None

    def next(self, position: LanePosition) -> TokenBlock | None:
        """The block at `position`; None at the end."""
        if self._prefetched is None or self._prefetched[0] != position:
            self._prefetch(position)
        assert self._prefetched is not None
        block = self._prefetched[1].result()
        if block is not None:
            self._prefetch(block.position)
        return block

    def _prefetch(self, position: LanePosition) -> None:
        # Not in the thread: allocating pinned memory there could invalidate a running graph capture.
        # torch reuses this memory only after all copies from it are done.
        memory = _pinned_memory(2 * self._most_tokens) if self._pinned else None
        self._prefetched = position, self._thread.submit(_prepare, self._source, position, memory)


def _prepare(source: BlockSource, position: LanePosition, memory: Tensor | None) -> TokenBlock | None:
    block = source.next(position)
    if block is None or memory is None:
        return block
    both_2BT = memory[: 2 * block.tokens_BT.numel()].view(2, *block.tokens_BT.shape)
    torch.stack([block.tokens_BT, block.targets_BT], out=both_2BT)
    tokens_BT, targets_BT = both_2BT
    return replace(block, tokens_BT=tokens_BT, targets_BT=targets_BT)


def _pinned_memory(num_tokens: int) -> Tensor:
    return torch.empty(num_tokens, dtype=torch.long, pin_memory=True)
