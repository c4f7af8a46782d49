"""The logits of a softmax. Shapes: D width, V logits."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

ROW = 8
"""A GPU is much slower if rows of logits are not a multiple of this many numbers."""

MANY = 64
"""With fewer rows, as in decoding, reading the weights dominates and padding saves nothing."""


def scores(hidden: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """W h + b in float32, [..., D] -> [..., V]."""
    padded = hidden.is_cuda and len(weight_VD) % ROW != 0 and hidden.numel() > MANY * hidden.shape[-1]
    product = padded_linear if padded else F.linear
    return product(hidden, weight_VD, bias_V).float()


def padded_linear(hidden: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """`F.linear` with the vocabulary padded to a multiple of `ROW`; the padding is dropped."""
    more = -len(weight_VD) % ROW
    weight = F.pad(weight_VD, (0, 0, 0, more))
    bias = None if bias_V is None else F.pad(bias_V, (0, more))
    return F.linear(hidden, weight, bias)[..., : len(weight_VD)]
