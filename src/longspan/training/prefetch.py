"""The next block is prepared while a step runs. Shapes: B lanes, T block."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType

import torch
from torch import Tensor

from longspan.data import BlockSource, LanePosition, TokenBlock


class Prefetcher:
    """`next` of a walk through the text, one block ahead: while a step runs, a thread prepares the next.

    For a GPU blocks lie in pinned memory, from where it fetches them while the host goes on. A block that was
    not foreseen, such as the first after a rehearsal, is prepared when it is asked for. What goes wrong in
    the thread is raised where its block is asked for. The thread ends with the `with`.
    """

    _walk: BlockSource

    def __init__(self, most_tokens: int, device: torch.device) -> None:
        """`most_tokens` are those of the largest block."""
        self._most_tokens = most_tokens
        self._pinned = device.type == "cuda"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="blocks-ahead")
        self._foreseen: tuple[LanePosition, Future[TokenBlock | None]] | None = None

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(cancel_futures=True)

    def follow(self, walk: BlockSource) -> None:
        """Go on by another walk: what was foreseen may be cut otherwise there."""
        self._walk, self._foreseen = walk, None

    def next(self, position: LanePosition) -> TokenBlock | None:
        """The block at `position`, as the walk has it."""
        if self._foreseen is None or self._foreseen[0] != position:
            self._foresee(position)
        assert self._foreseen is not None
        block = self._foreseen[1].result()
        if block is not None:
            self._foresee(block.position)
        return block

    def _foresee(self, position: LanePosition) -> None:
        # Not in the thread: to ask for pinned memory while a step is recorded would spoil the recording.
        # torch gives memory out again only when copies from it are done.
        memory = _pinned_memory(2 * self._most_tokens) if self._pinned else None
        self._foreseen = position, self._thread.submit(_prepared, self._walk, position, memory)


def _prepared(walk: BlockSource, position: LanePosition, memory: Tensor | None) -> TokenBlock | None:
    block = walk.next(position)
    if block is None or memory is None:
        return block
    both_2BT = memory[: 2 * block.tokens_BT.numel()].view(2, *block.tokens_BT.shape)
    torch.stack([block.tokens_BT, block.targets_BT], out=both_2BT)
    tokens_BT, targets_BT = both_2BT
    return replace(block, tokens_BT=tokens_BT, targets_BT=targets_BT)


def _pinned_memory(num_tokens: int) -> Tensor:
    return torch.empty(num_tokens, dtype=torch.long, pin_memory=True)
