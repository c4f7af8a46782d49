"""Every head remembers the last positions, as many as it may ever see, whatever blocks they came in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.layers import kv_cache

B, K = 2, 3


def positions(first: int, end: int, heads: int) -> torch.Tensor:
    """Keys and values [B, T, 2H, K] that say where they are from: text, position, key or value, and head."""
    b, t, x, k = torch.meshgrid(
        torch.arange(B), torch.arange(first, end), torch.arange(2 * heads), torch.arange(K), indexing="ij"
    )
    return (b * 1_000_000 + t * 1_000 + x * 10 + k).double()


@settings(max_examples=60, deadline=None)
@given(
    caps=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    blocks=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 14)), min_size=1, max_size=6),
)
def test_blocks_and_depths_of_any_size(caps: list[int], blocks: list[tuple[int, int]]) -> None:
    memory, read, there = kv_cache.empty(torch.zeros((), dtype=torch.float64), B, caps, 0, K), 0, 0
    for length, depth in blocks:
        memory = kv_cache.appended(memory, positions(read, read + length, len(caps)), caps, depth)
        read, there = read + length, min(max(caps), depth, there + length)
        every = positions(0, read, len(caps)).unflatten(2, (2, len(caps)))
        rows = kv_cache.by_head(memory, caps)
        for head, (cap, rows_BM2K) in enumerate(zip(caps, rows, strict=True)):
            held = min(cap, there)
            assert torch.equal(rows_BM2K, every[:, read - held :, :, head])
        assert memory.transpose(0, 1).is_contiguous()


def test_heads_together_have_their_keys_and_then_their_values() -> None:
    caps = [5, 2, 5]
    memory = kv_cache.empty(torch.zeros((), dtype=torch.float64), B, caps, 0, K)
    memory = kv_cache.appended(memory, positions(0, 9, 3), caps, 9)
    rows = kv_cache.by_head(memory, caps)
    together = kv_cache._of_group([rows[0], rows[2]], 4)
    assert torch.equal(together, positions(5, 9, 3)[:, :, [0, 2, 3, 5]])


def test_a_head_alone_is_not_copied() -> None:
    memory = torch.randn(5, B, 2, K).transpose(0, 1)
    alone = kv_cache._of_group(kv_cache.by_head(memory, [2, 3])[1:], 9)
    assert alone.data_ptr() == memory[:, 2:].data_ptr()


def test_more_rows_than_heads_remember() -> None:
    with pytest.raises(ValueError, match="6 rows are more than 2 heads remember"):
        kv_cache.by_head(torch.zeros(B, 6, 2, K), [2, 3])
