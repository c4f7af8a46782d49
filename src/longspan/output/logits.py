"""The product that every softmax begins with. Shapes: D width, V scores."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

ROW = 8
"""A GPU is much slower where rows of scores do not begin at multiples of this many numbers."""

MANY = 64
"""With fewer rows, as in decoding, reading the weights takes longer than anything that padding saves."""


def scores(hidden: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """W h + b in float32, [..., D] -> [..., V]."""
    padded = hidden.is_cuda and len(weight_VD) % ROW != 0 and hidden.numel() > MANY * hidden.shape[-1]
    product = padded_linear if padded else F.linear
    return product(hidden, weight_VD, bias_V).float()


def padded_linear(hidden: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """`F.linear` by way of scores that nobody asked for, so that rows are whole."""
    more = -len(weight_VD) % ROW
    weight = F.pad(weight_VD, (0, 0, 0, more))
    bias = None if bias_V is None else F.pad(bias_V, (0, more))
    return F.linear(hidden, weight, bias)[..., : len(weight_VD)]
