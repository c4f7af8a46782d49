"""Which heads of a layer are computed together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class HeadGroups:
    """Groups of heads, each computed over the longest window of its heads."""

    windows_H: tuple[int, ...]
    """How many distances each head sees."""

    groups: list[list[int]]

    @cached_property
    def order(self) -> list[int]:
        """All heads; heads of a group are adjacent."""
        return [head for heads in self.groups for head in heads]

    @cached_property
    def sizes(self) -> list[int]:
        return [len(heads) for heads in self.groups]

    @cached_property
    def reaches(self) -> list[int]:
        """The longest window of every group."""
        return [max(self.windows_H[head] for head in heads) for heads in self.groups]

    @cached_property
    def ordered_windows(self) -> list[int]:
        return [self.windows_H[head] for head in self.order]
