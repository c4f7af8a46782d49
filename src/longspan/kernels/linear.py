"""Products with a weight matrix. Shapes: N rows, C parts of the matrix, D width in, E width out."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longspan.kernels.dispatch import use_triton

SMALL_BATCH = 16
"""Up to this many rows a product takes as long as reading its weights."""

GEMV_ROWS = 4
"""Up to this many rows the weights are read fastest in parts; with more rows oneDNN is faster."""

ALIKE: ContextVar[bool] = ContextVar("ALIKE", default=False)
"""Whether products prepared now use one library on a CPU, for any number of rows (see serving/slots.py)."""

MKL_WEIGHTS = 2**18  # with fewer weights, torch's library is faster than oneDNN for up to 32 rows

PARTS = 4
"""Parts of a matrix that are multiplied in parallel; more gave no more speed on up to four cores."""


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al., 2021)."""
    return torch.relu(x).square()


def linear(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """`F.linear`: W x + b, on a CPU by the fastest library for the number of rows."""
    rows = x.numel() // x.shape[-1]
    if 0 < rows <= GEMV_ROWS and _on_cpu(x) and not torch.is_grad_enabled():
        return FixedProduct(weight_ED, bias_E)(x.reshape(1, rows, -1)).reshape(*x.shape[:-1], -1)
    if rows > SMALL_BATCH and _by_onednn(x):
        return _Linear.apply(x, weight_ED, bias_E)  # type: ignore[no-untyped-call]
    if rows > GEMV_ROWS and _by_onednn(x) and not torch.is_grad_enabled():
        return _product(x, weight_ED, bias_E)
    return F.linear(x, weight_ED, bias_E)


class FixedProduct:
    """W x + b for a few rows at the speed of reading W, prepared for many calls.

    On a CPU torch's library computes such a product on one core. Here W is cut into parts, each for a part of
    the result: a batch of products is divided among all cores. W is the left operand, so that its rows are
    read in storage order. On a GPU it is one kernel (`gemv.py`).
    """

    def __init__(self, weight_ED: Tensor, bias_E: Tensor | None = None) -> None:
        outputs, width = weight_ED.shape
        parts = PARTS if outputs % PARTS == 0 else 1
        self._weight_ED, self._bias_E = weight_ED, bias_E
        self._weight_CED = weight_ED.view(parts, -1, width)
        self._bias_CE1 = None if bias_E is None else bias_E.view(parts, -1, 1)
        by_onednn = _by_onednn(weight_ED) and weight_ED.numel() > MKL_WEIGHTS
        alike = ALIKE.get() and weight_ED.device.type == "cpu"
        self._always: Any = (_product if by_onednn else F.linear) if alike else None

    def __call__(self, x_1ND: Tensor, *, onto: Tensor | None = None, activation: Any = None) -> Tensor:
        """[1, N, E]: W x + b, with an `activation`, or added to `onto`."""
        is_gemv = x_1ND.shape[1] <= GEMV_ROWS and self._always is None
        if is_gemv and use_triton(x_1ND):
            from longspan.kernels import gemv

            fused = activation is squared_relu
            out_1NE = gemv.product(x_1ND, self._weight_ED, self._bias_E, onto, squared_relu=fused)
            return out_1NE if fused or activation is None else activation(out_1NE)
        in_parts, product = is_gemv and x_1ND.device.type == "cpu", self._always or linear
        out_1NE = self._in_parts(x_1ND) if in_parts else product(x_1ND, self._weight_ED, self._bias_E)
        out_1NE = out_1NE if activation is None else activation(out_1NE)
        return out_1NE if onto is None else onto + out_1NE

    def _in_parts(self, x_1ND: Tensor) -> Tensor:
        x_CDN = x_1ND.expand(self._weight_CED.shape[0], -1, -1).mT
        if self._bias_CE1 is None:
            out_CEN = torch.bmm(self._weight_CED, x_CDN)
        else:
            out_CEN = torch.baddbmm(self._bias_CE1, self._weight_CED, x_CDN)
        return out_CEN.view(1, -1, x_1ND.shape[1]).mT


def _on_cpu(x: Tensor) -> bool:
    """On a CPU, and neither torch.compile nor autocast chooses the product."""
    return (
        x.device.type == "cpu" and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()
    )


def _by_onednn(x: Tensor) -> bool:
    return _on_cpu(x) and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()


class _Linear(torch.autograd.Function):
    """By oneDNN: outputs and the gradient of the input. torch itself uses it in lower precisions only.

    The gradient of the weights, a sum over all rows, is faster by torch's other library.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_ED)
        return _product(x, weight_ED, bias_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_ED = ctx.saved_tensors
        dout_NE = dout.reshape(-1, dout.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _product(dout_NE, weight_ED.t(), None).view(x.shape) if needs_x else None,
            dout_NE.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None,
            dout_NE.sum(0) if needs_bias else None,
        )


def _product(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_ED, bias_E, "none", [], "")
    return out
