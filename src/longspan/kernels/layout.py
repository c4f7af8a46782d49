"""The layout of tensors: contiguous rows, and a split whose backward pass need not copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def contiguous_rows(x: Tensor) -> Tensor:
    """With contiguous rows, as the kernels read them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(*tensors: Tensor) -> list[int]:
    """The first three strides of every tensor."""
    return [tensor.stride(dim) for tensor in tensors for dim in range(3)]


def contiguous_split(x: Tensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """`x.split(sizes, dim)`; gradients that are such parts of one tensor are not copied."""
    if not torch.is_grad_enabled():
        return tuple(x.split(sizes, dim))
    parts: tuple[Tensor, ...] = _ContiguousSplit.apply(x, tuple(sizes), dim)  # type: ignore[no-untyped-call]
    return parts


class _ContiguousSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], dim: int) -> tuple[Tensor, ...]:
        ctx.shape, ctx.sizes, ctx.dim = x.shape, sizes, dim
        return x.split(sizes, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dparts: Tensor) -> tuple[Tensor, None, None]:
        first = dparts[0]
        steps = tuple(math.prod(ctx.shape[axis + 1 :]) for axis in range(len(ctx.shape)))
        starts = accumulate(ctx.sizes[:-1], initial=0)
        parts_of_one = all(
            dpart.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and dpart.storage_offset() == first.storage_offset() + start * steps[ctx.dim]
            and dpart.stride() == steps
            for start, dpart in zip(starts, dparts, strict=True)
        )
        whole = first.as_strided(ctx.shape, steps) if parts_of_one else torch.cat(dparts, ctx.dim)
        return whole, None, None
