"""The end of a post-norm block. Shapes: B batch, T block, D width."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor, nn

from longspan.kernels.dispatch import use_triton
from longspan.layers.dropout import GrowingDropout
from longspan.layers.dropout import dropout as drop
from longspan.layers.projections import product_dtype


def normed_sum(
    norm: nn.Module,
    h_BTD: Tensor,
    out_BTD: Tensor,
    dropout: float | GrowingDropout = 0.0,
    *,
    training: bool = False,
) -> Tensor:
    """LN(h + dropout(out)), in the precision of products.

    Products and one more sum follow, whose terms have the same precision. A residual stream in full precision
    would be rounded for every product, and would need twice the memory traffic.
    """
    dtype = product_dtype(h_BTD)
    if (kernels := kernels_for(norm, h_BTD, dropout)) is not None:
        ending = kernels.Norm(norm.weight, norm.bias, norm.eps, dropout if training else 0.0)
        summed_BTD: Tensor = kernels.normed_sum(h_BTD, out_BTD, ending, dtype)
        return summed_BTD
    exact = torch.promote_types(h_BTD.dtype, next(norm.parameters()).dtype)
    normed_BTD: Tensor = norm(h_BTD.to(exact) + drop(out_BTD, dropout, training))
    return normed_BTD.to(dtype)


def kernels_for(norm: nn.Module, x: Tensor, dropout: float | GrowingDropout) -> ModuleType | None:
    """The kernels for the device of `x`, if there are any: only for torch's LayerNorm with both weights."""
    plain = type(norm) is nn.LayerNorm and norm.bias is not None and len(norm.normalized_shape) == 1
    if not plain or isinstance(dropout, GrowingDropout) or not use_triton(x):
        return None
    from longspan.kernels import post_norm

    return post_norm
