"""Divides matrices over the ranks, so that each is computed on one of them only.

Shapes: W ranks, N matrices of one shape, R rows, C columns, n = ceil(N / W) matrices for a rank,
r = ceil(R / W) rows in a shard. Rank w computes the matrices from w n up to (w + 1) n. The last ranks may
have fewer matrices and rows, or none. What is sent is filled up with zeros to n matrices and r rows.

The result of each function waits for the last communication, so that a caller can start more work before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.distributed import rank, size

Compute = Callable[[Tensor], Tensor]
"""From matrices [N, R, C] to as many of the same shape."""


def divided(x_NRC: Tensor, compute: Compute) -> Callable[[], Tensor]:
    """`compute(x)`, where every rank has all matrices and needs all results."""
    count, rows, columns = x_NRC.shape
    share = _share(count)
    results_nRC = compute(x_NRC[owned(count)])
    sent_nRC = _filled(results_nRC, share, rows)
    gathered_NRC = sent_nRC.new_empty(size() * share, rows, columns)
    # torch 2.13 renames it; older versions know only the second name.
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    work = all_gather(gathered_NRC, sent_nRC, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return gathered_NRC[:count]

    return wait


def divided_rows(shards_NrC: Tensor, rows: int, compute: Compute) -> Callable[[], Tensor]:
    """`compute(x)`, where every rank has some rows of every matrix and needs the results of these rows.

    Rows are divided as `torch.chunk` does it. A rank receives its own matrices whole, and no others.
    """
    count, held, columns = shards_NrC.shape
    share, rows_each = _share(count), _share(rows)
    received_WnrC = torch.empty(
        size(), share, rows_each, columns, dtype=shards_NrC.dtype, device=shards_NrC.device
    )
    dist.all_to_all_single(received_WnrC, _filled(shards_NrC, size() * share, rows_each))
    x_nRC = received_WnrC.transpose(0, 1).reshape(share, -1, columns)
    results_nRC = compute(x_nRC[: len(range(count)[owned(count)]), :rows])
    filled_nWrC = _filled(results_nRC, share, size() * rows_each).view(share, size(), rows_each, columns)
    sent_WnrC = filled_nWrC.transpose(0, 1).contiguous()
    returned_WnrC = torch.empty_like(sent_WnrC)
    work = dist.all_to_all_single(returned_WnrC, sent_WnrC, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return returned_WnrC.view(-1, rows_each, columns)[:count, :held]

    return wait


def _share(number: int) -> int:
    """The most that one rank has of this many."""
    return -(-number // size())


def owned(number: int) -> slice:
    """Which of this many belong to this rank."""
    share = _share(number)
    return slice(rank() * share, (rank() + 1) * share)


def _filled(x_NRC: Tensor, count: int, rows: int) -> Tensor:
    """With zeros up to `count` matrices of `rows` rows."""
    filled = x_NRC.new_zeros(count, rows, x_NRC.shape[2])
    filled[: x_NRC.shape[0], : x_NRC.shape[1]] = x_NRC
    return filled
