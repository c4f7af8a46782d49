"""The matrices around attention, permuted by heads, and the projection of the memory on a GPU.

Each is one autograd function: autograd by itself would run many small operations.

Shapes: H heads, K head width, D width, B batch, M memory, N = M x B, X width of a group's keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.layers.head_groups import HeadGroups
from longspan.layers.select_heads import index_of, indices_of


class OrderedWeights(NamedTuple):
    """Weight matrices of attention, permuted so that heads of a group are adjacent."""

    qkv: Tensor
    """Rows of queries, keys and values."""
    out: Tensor
    recalled: list[Tensor]
    """For every group that projects a memory: its rows of keys and values."""


def ordered_weights(
    qkv: Sequence[Tensor], out: Tensor, heads: HeadGroups, head_width: int, *, recalls: bool
) -> OrderedWeights:
    """Permute rows and columns so that heads of a group are adjacent."""
    order, num_heads = heads.order, len(heads.order)
    pieces = [indices_of((0, 1, 2), order, num_heads)]
    pieces += [indices_of((1, 2), group, num_heads) for group in heads.groups if recalls]
    if order == sorted(order):
        ordered, *recalled = rows_of_heads(qkv, pieces, head_width)
        return OrderedWeights(ordered, out, recalled)
    pieces.append(indices_of((3,), order, num_heads))
    ordered, *recalled, columns = rows_of_heads([*qkv, out.mT], pieces, head_width)
    return OrderedWeights(ordered, columns.mT, recalled)


def product_dtype(x: Tensor) -> torch.dtype:
    """The precision in which `x` is multiplied: autocast's, where it is enabled."""
    kind = x.device.type
    lowered = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if lowered else x.dtype


def rows_of_heads(
    matrices: Sequence[Tensor], pieces: Sequence[list[int]], head_width: int
) -> tuple[Tensor, ...]:
    """For every piece the rows of its heads, in the precision of products.

    Matrices are [HK, D]. Heads are numbered through all of them: head h of the second one is H + h.
    """
    rows: tuple[Tensor, ...] = _RowsOfHeads.apply(  # type: ignore[no-untyped-call]
        pieces, head_width, product_dtype(matrices[0]), *matrices
    )
    return rows


class _RowsOfHeads(torch.autograd.Function):
    """One copy for all pieces. A row may be in two of them: its gradient is their sum, in float32."""

    @staticmethod
    def forward(
        ctx: Any, pieces: Sequence[list[int]], head_width: int, dtype: torch.dtype, *matrices: Tensor
    ) -> tuple[Tensor, ...]:
        rows = torch.cat(matrices).to(dtype)
        ctx.shape, ctx.dtype, ctx.index = rows.shape, matrices[0].dtype, None
        ctx.sizes = [len(matrix) for matrix in matrices]
        if all(piece == list(range(piece[0], piece[-1] + 1)) for piece in pieces):
            ends = [(piece[0], piece[-1] + 1) for piece in pieces]
        else:
            ctx.index = index_of(tuple(chain(*pieces)), rows.device)
            rows = torch.unflatten(rows, 0, (-1, head_width)).index_select(0, ctx.index).flatten(0, 1)
            ends = list(pairwise(accumulate(map(len, pieces), initial=0)))
        ctx.ends = [(start * head_width, stop * head_width) for start, stop in ends]
        return tuple(rows[start:stop] for start, stop in ctx.ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dpieces: Tensor) -> tuple[Tensor | None, ...]:
        exact = torch.promote_types(ctx.dtype, torch.float32)
        if ctx.index is None and len(dpieces) == 1 and dpieces[0].shape == ctx.shape:
            return None, None, None, *dpieces[0].to(ctx.dtype).split(ctx.sizes)
        drows = dpieces[0].new_zeros(ctx.shape, dtype=exact)
        if ctx.index is None:
            for (start, stop), dpiece in zip(ctx.ends, dpieces, strict=True):
                drows[start:stop] += dpiece
        else:
            by_head = (len(ctx.index), -1)
            dpicked = torch.cat(dpieces).to(exact).view(by_head)
            drows.view(-1, dpicked.shape[1]).index_add_(0, ctx.index, dpicked)
        return None, None, None, *drows.to(ctx.dtype).split(ctx.sizes)


def end_to_end(
    memory_MBD: Tensor, reaches: Sequence[int], weights_XD: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """For every group its matrix times the last rows that it reaches, [M, B, X], in one buffer."""
    products: tuple[Tensor, ...] = _EndToEnd.apply(  # type: ignore[no-untyped-call]
        memory_MBD.to(weights_XD[0].dtype).contiguous(), tuple(reaches), *weights_XD
    )
    return products


class _EndToEnd(torch.autograd.Function):
    """Products and their gradients are in the buffers that the attention kernels use."""

    @staticmethod
    def forward(
        ctx: Any, memory_MBD: Tensor, reaches: tuple[int, ...], *weights_XD: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(memory_MBD, *weights_XD)
        sizes = [
            (_last(memory_MBD, reach).shape[0], len(w)) for reach, w in zip(reaches, weights_XD, strict=True)
        ]
        batch = memory_MBD.shape[1]
        buffer = memory_MBD.new_empty(sum(rows * batch * width for rows, width in sizes))
        parts = buffer.split([rows * batch * width for rows, width in sizes])
        products = []
        for part, (rows, width), weight_XD in zip(parts, sizes, weights_XD, strict=True):
            near_ND = _last(memory_MBD, rows).flatten(0, 1)
            torch.mm(near_ND, weight_XD.t(), out=part.view(rows * batch, width))
            products.append(part.view(rows, batch, width))
        return tuple(products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dproducts: Tensor) -> tuple[Tensor | None, ...]:
        memory_MBD, *weights_XD = ctx.saved_tensors
        dmemory_MBD = torch.zeros_like(memory_MBD) if ctx.needs_input_grad[0] else None
        dweights: list[Tensor] = []
        for dproduct_MBX, weight_XD in zip(dproducts, weights_XD, strict=True):
            dproduct_NX, rows = dproduct_MBX.flatten(0, 1), dproduct_MBX.shape[0]
            dweights.append(dproduct_NX.t() @ _last(memory_MBD, rows).flatten(0, 1))
            if dmemory_MBD is not None:
                _last(dmemory_MBD, rows).flatten(0, 1).addmm_(dproduct_NX, weight_XD)
        return dmemory_MBD, None, *dweights


def _last(x_MBD: Tensor, rows: int) -> Tensor:
    return x_MBD[max(0, x_MBD.shape[0] - rows) :]
