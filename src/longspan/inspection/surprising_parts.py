"""The most surprising parts of a text of any length: a few are kept while the text is read."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspan.inspection.surprise import Block

PART = 64  # tokens
KEPT = 20


@dataclass(frozen=True, order=True)
class SurprisingPart:
    """Some tokens that follow each other; ordered by their bits."""

    bits_per_token: float
    first: int  # number of the first token in the text
    ids: tuple[int, ...]


class SurprisingParts:
    """The parts with the most bits. Every block is cut into parts, and shorter ends are left out."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._heap: list[SurprisingPart] = []  # the least surprising first

    def add(self, block: Block) -> None:
        for start in range(0, len(block.ids) - PART + 1, PART):
            mean = sum(block.bits[start : start + PART]) / PART
            if len(self._heap) < self._kept or mean > self._heap[0].bits_per_token:
                part = SurprisingPart(mean, block.first + start, tuple(block.ids[start : start + PART]))
                if len(self._heap) < self._kept:
                    heapq.heappush(self._heap, part)
                else:
                    heapq.heapreplace(self._heap, part)

    def __iter__(self) -> Iterator[SurprisingPart]:
        """The most surprising first; of equal ones the earlier."""
        return iter(sorted(self._heap, key=lambda part: (-part.bits_per_token, part.first)))
