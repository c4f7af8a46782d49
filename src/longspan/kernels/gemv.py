"""W x + b for small batches x on a GPU, squared after a relu or with a residual added, in one kernel.

Such a product takes as long as reading W, if enough programs read it in parallel. A decoding step is mostly
a chain of such products, so fewer kernel launches make it faster.

Shapes: N rows, D width in, E width out.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Weights that a program reads at a time."""


def product(
    x_1ND: Tensor, weight_ED: Tensor, bias_E: Tensor | None, onto_1NE: Tensor | None, squared_relu: bool
) -> Tensor:
    """[1, N, E]: W x + b + `onto`, or relu(W x + b)^2, all in one precision; W is contiguous."""
    outputs, width = weight_ED.shape
    rows = x_1ND.shape[1]
    out_1NE = x_1ND.new_empty(1, rows, outputs)
    columns = min(triton.next_power_of_2(width), TILE)
    at_once = TILE // columns
    _product_kernel[(triton.cdiv(outputs, at_once), rows)](
        x_1ND.contiguous(), weight_ED, bias_E, None if onto_1NE is None else onto_1NE.contiguous(), out_1NE,
        outputs, width, HAS_BIAS=bias_E is not None, HAS_ONTO=onto_1NE is not None,
        SQUARED_RELU=squared_relu, BE=at_once, BD=columns,
    )  # fmt: skip
    return out_1NE


@triton.jit
def _product_kernel(
    X, WEIGHT, BIAS, ONTO, OUT, outputs, width,
    HAS_BIAS: tl.constexpr, HAS_ONTO: tl.constexpr, SQUARED_RELU: tl.constexpr, BE: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    e_E = tl.program_id(0) * BE + tl.arange(0, BE)
    inside_E = e_E < outputs
    sums_ED = tl.zeros([BE, BD], tl.float32)
    for start in range(0, width, BD):
        d_D = start + tl.arange(0, BD)
        inside_D = d_D < width
        x_D = tl.load(X + row * width + d_D, mask=inside_D, other=0.0).to(tl.float32)
        here_ED = inside_E[:, None] & inside_D[None, :]
        at_ED = e_E[:, None].to(tl.int64) * width + d_D[None, :]
        sums_ED += tl.load(WEIGHT + at_ED, mask=here_ED, other=0.0).to(tl.float32) * x_D[None, :]
    out_E = tl.sum(sums_ED, 1)
    if HAS_BIAS:
        out_E += tl.load(BIAS + e_E, mask=inside_E, other=0.0).to(tl.float32)
    if SQUARED_RELU:
        out_E = tl.where(out_E < 0, 0.0, out_E * out_E)
    at_E = row * outputs + e_E
    if HAS_ONTO:
        out_E += tl.load(ONTO + at_E, mask=inside_E, other=0.0).to(tl.float32)
    tl.store(OUT + at_E, out_E.to(OUT.dtype.element_ty), mask=inside_E)
