"""Memory in its decoding form: the projected keys and values of every group of heads.

It replaces a memory of hidden states while the weights are fixed. The state has a branch `past`
with one tensor for every group, [B, M, X, K]: keys of its heads, then their values, oldest first.

Shapes: B batch, M memory, T block, G heads of a group, X = 2G (2H in the block), K head width.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from torch import Tensor

from longspan.layers.head_groups import HeadGroups
from longspan.layers.hidden_memory import appended as append_rows
from longspan.layers.select_heads import indices_of, select_heads
from longspan.state import State


def branch(past: Iterable[Tensor]) -> State:
    return State({str(number): kv_BMXK for number, kv_BMXK in enumerate(past)})


def by_group(state: State) -> list[Tensor]:
    past = state.branch("past")
    return [past.tensor(str(number)) for number in range(len(past))]


def appended(past: Iterable[Tensor], new_BTXK: Tensor, heads: HeadGroups, depth: int) -> State:
    """The memory after a block: each group keeps what it sees, up to `depth` positions."""
    ends = list(accumulate(heads.sizes))
    after = []
    for kv_BMXK, end, size, reach in zip(past, ends, heads.sizes, heads.reaches, strict=True):
        own = indices_of((0, 1), range(end - size, end), ends[-1])
        after.append(append_rows(kv_BMXK, select_heads(new_BTXK, own, dim=2), min(depth, reach)))
    return branch(after)
