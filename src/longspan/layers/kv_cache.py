"""KV cache: the keys and values of all heads, one head after the other in a single tensor.

Nothing is projected twice. A head remembers no more positions than it may ever see, its cap: a memory of
depth m holds the last min(cap, m) positions of every head, oldest first. So a head with a short span costs
little, and the depth follows from the number of rows. Storage is position-major, as the GPU kernels read it:
the rows of all texts at one position are adjacent.

Shapes: B batch, R rows of all heads, M rows of one, T block, H heads, G heads of a group, X = 2H or 2G (keys
of all heads, then their values), K head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from longspan.layers.head_groups import HeadGroups


def empty(like: Tensor, batch_size: int, caps: Sequence[int], depth: int, head_width: int) -> Tensor:
    """Zeros, [B, R, 2, K]."""
    return like.new_zeros(sum(_lengths(caps, depth)), batch_size, 2, head_width).transpose(0, 1)


def by_head(memory_BR2K: Tensor, caps: Sequence[int]) -> list[Tensor]:
    """The memory of every head, [B, M, 2, K]: views."""
    ends = list(accumulate(_lengths(caps, _depth(memory_BR2K.shape[1], caps)), initial=0))
    return [memory_BR2K[:, begin:end] for begin, end in pairwise(ends)]


def by_group(memory_BR2K: Tensor, caps: Sequence[int], heads: HeadGroups) -> list[Tensor]:
    """The part of the memory that every group of heads sees, [B, M, X, K]; heads of a group have one cap."""
    rows = by_head(memory_BR2K, caps)
    each = zip(heads.groups, heads.reaches, strict=True)
    return [_of_group([rows[head] for head in group], reach) for group, reach in each]


def _of_group(rows: Sequence[Tensor], reach: int) -> Tensor:
    """The last `reach` positions of these heads, or all there are, [B, M, X, K]."""
    last = [rows_BM2K[:, max(0, rows_BM2K.shape[1] - reach) :] for rows_BM2K in rows]
    return last[0] if len(last) == 1 else torch.stack(last, dim=3).flatten(2, 3)


def appended(memory_BR2K: Tensor, new_BTXK: Tensor, caps: Sequence[int], depth: int) -> Tensor:
    """The memory after a block: of this depth, or less deep if less was read."""
    old, block = by_head(memory_BR2K, caps), new_BTXK.shape[1]
    depth = min(depth, _depth(memory_BR2K.shape[1], caps) + block)
    new_BT2HK = new_BTXK.unflatten(2, (2, len(caps)))
    size = (sum(_lengths(caps, depth)), new_BTXK.shape[0], 2, new_BTXK.shape[-1])
    after_BR2K = new_BTXK.new_empty(size).transpose(0, 1)
    for head, rows_BM2K in enumerate(by_head(after_BR2K, caps)):
        kept = max(0, rows_BM2K.shape[1] - block)
        fresh = rows_BM2K.shape[1] - kept
        # `narrow` and not an index: an index of all rows is no view, and autograd refuses to write into it.
        rows_BM2K.narrow(1, 0, kept).copy_(old[head][:, old[head].shape[1] - kept :])
        rows_BM2K.narrow(1, kept, fresh).copy_(new_BT2HK[:, block - fresh :, :, head])
    return after_BR2K


def _lengths(caps: Sequence[int], depth: int) -> list[int]:
    return [min(cap, depth) for cap in caps]


def _depth(rows: int, caps: Sequence[int]) -> int:
    """The depth at which a memory has `rows` rows."""
    rising = sorted(caps)
    for heads, (cap, below) in enumerate(zip(rising, accumulate(rising, initial=0), strict=False)):
        if rows <= below + cap * (len(caps) - heads):
            return (rows - below) // (len(caps) - heads)
    raise ValueError(f"{rows} rows are more than {len(caps)} heads remember")
