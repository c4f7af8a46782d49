"""Where a post-norm block ends. Shapes: B batch, T block, D width."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longspan.layers.projections import product_dtype


def normed_sum(norm: nn.Module, h_BTD: Tensor, out_BTD: Tensor) -> Tensor:
    """LN(h + out), in the precision of products.

    What follows is products with it, and one more sum: that starts from numbers as exact as those it adds. A
    stream in full precision would be rounded for every product, and be twice as much to write and read.
    """
    exact = torch.promote_types(h_BTD.dtype, norm.get_parameter("weight").dtype)
    normed_BTD: Tensor = norm(h_BTD.to(exact) + out_BTD)
    return normed_BTD.to(product_dtype(h_BTD))
