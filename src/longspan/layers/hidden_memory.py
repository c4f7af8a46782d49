"""Memory of hidden states: the last inputs of a layer, oldest first.

They are projected with the current weights in every block, for every group of heads only as far back as it
sees. Storage is position-major: the rows of all texts at one position are adjacent.

Shapes: B batch, M memory, T block, D width, X width of a group's keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from longspan.kernels.linear import linear
from longspan.layers.projections import end_to_end


def empty(weight: Tensor, batch_size: int, length: int) -> Tensor:
    """Zeros, [B, M, D]."""
    return weight.new_zeros(length, batch_size, weight.shape[1]).transpose(0, 1)


def project(
    memory_BMD: Tensor, reaches: Sequence[int], weights_XD: Sequence[Tensor], norm: nn.Module | None
) -> list[Tensor]:
    """For every group its matrix times the last rows that it reaches, [B, M, X]; `norm` is applied first."""
    if not torch.is_autocast_enabled(memory_BMD.device.type):
        memory_BMD = memory_BMD.to(weights_XD[0].dtype)  # it may have been filled under autocast
    projected = []
    for reach, weight_XD in zip(reaches, weights_XD, strict=True):
        near_BMD = last(memory_BMD, reach)
        near_BMD = near_BMD if norm is None else norm(near_BMD)
        projected.append(linear(near_BMD.transpose(0, 1), weight_XD).transpose(0, 1))
    return projected


def project_end_to_end(
    memory_BMD: Tensor, reaches: Sequence[int], weights_XD: Sequence[Tensor]
) -> list[Tensor]:
    """The same without a norm, in one buffer: the GPU kernels then need no copy."""
    products = end_to_end(memory_BMD.transpose(0, 1), reaches, weights_XD)
    return [kv_MBX.transpose(0, 1) for kv_MBX in products]


def appended(old: Tensor, new: Tensor, length: int) -> Tensor:
    """The last `length` rows of old and new together."""
    kept, new = last(old, max(0, length - new.shape[1])), last(new, length)
    # Written into a tensor of the memory's layout: `cat` would be slow, since new rows are batch-major.
    rows = new.new_empty(kept.shape[1] + new.shape[1], new.shape[0], *new.shape[2:]).transpose(0, 1)
    # `narrow` and not an index: an index of all rows is no view, and autograd refuses to write into it.
    rows.narrow(1, 0, kept.shape[1]).copy_(kept)
    rows.narrow(1, kept.shape[1], new.shape[1]).copy_(new)
    return rows


def last(x_BMX: Tensor, rows: int) -> Tensor:
    """The last `rows` rows, or all if there are fewer; none for 0."""
    return x_BMX[:, max(0, x_BMX.shape[1] - rows) :]
