"""Products with a matrix of weights. Shapes: N rows, C pieces of the matrix, D width in, E width out."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longspan.kernels.dispatch import use_triton

FEW = 16
"""With more rows than this a product takes longer than reading its weights."""

VERY_FEW = 4
"""Up to so many rows the weights are read fastest piece by piece; with more, oneDNN is faster."""

PIECES = 4
"""More give no more speed, up to this many processors."""


def linear(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """`F.linear`: W x + b. On a CPU by what is fastest there."""
    rows = x.numel() // x.shape[-1]
    if 0 < rows <= VERY_FEW and _on_cpu(x) and not torch.is_grad_enabled():
        return FixedProduct(weight_ED, bias_E)(x.reshape(1, rows, -1)).reshape(*x.shape[:-1], -1)
    if rows > FEW and _by_onednn(x):
        return _Linear.apply(x, weight_ED, bias_E)  # type: ignore[no-untyped-call]
    if rows > VERY_FEW and _by_onednn(x) and not torch.is_grad_enabled():
        return _product(x, weight_ED, bias_E)
    return F.linear(x, weight_ED, bias_E)


class FixedProduct:
    """W x + b for a few rows at the speed of reading W, prepared for many calls.

    On a CPU the library gives such a product to one processor. Here W is cut into pieces, each for its part
    of the result, and products of several matrices are divided among all processors. W stands first: the
    library then reads its rows as they lie. On a GPU it is one kernel of our own.
    """

    def __init__(self, weight_ED: Tensor, bias_E: Tensor | None = None) -> None:
        outputs, width = weight_ED.shape
        pieces = PIECES if outputs % PIECES == 0 else 1
        self._weight_ED, self._bias_E = weight_ED, bias_E
        self._weight_CED = weight_ED.view(pieces, -1, width)
        self._bias_CE1 = None if bias_E is None else bias_E.view(pieces, -1, 1)

    def __call__(self, x_1ND: Tensor, *, onto: Tensor | None = None) -> Tensor:
        """[1, N, E]: the product, added to `onto`."""
        few = x_1ND.shape[1] <= VERY_FEW
        if few and (kernels := _kernels(x_1ND)) is not None:
            out_1NE: Tensor = kernels.product(x_1ND, self._weight_ED, self._bias_E, onto)
            return out_1NE
        by_pieces = few and x_1ND.device.type == "cpu"
        out_1NE = self._by_pieces(x_1ND) if by_pieces else linear(x_1ND, self._weight_ED, self._bias_E)
        return out_1NE if onto is None else onto + out_1NE

    def _by_pieces(self, x_1ND: Tensor) -> Tensor:
        x_CDN = x_1ND.expand(self._weight_CED.shape[0], -1, -1).mT
        if self._bias_CE1 is None:
            out_CEN = torch.bmm(self._weight_CED, x_CDN)
        else:
            out_CEN = torch.baddbmm(self._bias_CE1, self._weight_CED, x_CDN)
        return out_CEN.view(1, -1, x_1ND.shape[1]).mT


def relu_feed_forward(
    x: Tensor, w1_ED: Tensor, b1_E: Tensor | None, w2_DE: Tensor, b2_D: Tensor | None, dropout: float = 0.0
) -> Tensor:
    """W2 dropout(relu(W1 x + b1)) + b2."""
    if x.numel() // x.shape[-1] > FEW and _by_onednn(x):
        return _ReluFeedForward.apply(x, w1_ED, b1_E, w2_DE, b2_D, dropout)  # type: ignore[no-untyped-call]
    inner = F.dropout(torch.relu(linear(x, w1_ED, b1_E)), dropout, dropout > 0)
    return linear(inner, w2_DE, b2_D)


def _kernels(x: Tensor) -> ModuleType | None:
    if not use_triton(x):
        return None
    from longspan.kernels import gemv

    return gemv


def _on_cpu(x: Tensor) -> bool:
    """Neither on another device nor for a compiler or autocast to decide."""
    return (
        x.device.type == "cpu" and not torch.is_autocast_enabled("cpu") and not torch.compiler.is_compiling()
    )


def _by_onednn(x: Tensor) -> bool:
    return _on_cpu(x) and x.dtype == torch.float32 and torch.backends.mkldnn.is_available()


class _Linear(torch.autograd.Function):
    """By oneDNN, where it is the faster of torch's two libraries; torch asks it only in lower precisions.

    That is for outputs and the gradient of what went in; sums over all rows are for the other.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_ED, bias_E)
        return _product(x, weight_ED, bias_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return _gradients(ctx.needs_input_grad, dout, *ctx.saved_tensors)


class _ReluFeedForward(torch.autograd.Function):
    """Both products in one, so that the wide gradient between them can be changed in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w1_ED: Tensor,
        b1_E: Tensor | None,
        w2_DE: Tensor,
        b2_D: Tensor | None,
        dropout: float,
    ) -> Tensor:
        inner = F.dropout(_product(x, w1_ED, b1_E, "relu"), dropout, dropout > 0)
        ctx.save_for_backward(x, w1_ED, b1_E, w2_DE, b2_D, inner)
        ctx.dropout = dropout
        return _product(inner, w2_DE, b2_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, w1_ED, b1_E, w2_DE, b2_D, inner = ctx.saved_tensors
        wants_x, wants_w1, wants_b1, wants_w2, wants_b2, _ = ctx.needs_input_grad
        dinner, dw2_DE, db2_D = _gradients((True, wants_w2, wants_b2), dout, inner, w2_DE, b2_D)
        assert dinner is not None
        # What relu or dropout has set to zero gets no gradient.
        torch.ops.aten.threshold_backward.grad_input(dinner, inner, 0, grad_input=dinner)
        if ctx.dropout > 0:
            dinner /= 1 - ctx.dropout
        dx, dw1_ED, db1_E = _gradients((wants_x, wants_w1, wants_b1), dinner, x, w1_ED, b1_E)
        return dx, dw1_ED, db1_E, dw2_DE, db2_D, None


def _product(x: Tensor, weight_ED: Tensor, bias_E: Tensor | None, then: str = "none") -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_ED, bias_E, then, [], "")
    return out


def _gradients(
    wanted: Sequence[bool], dout: Tensor, x: Tensor, weight_ED: Tensor, bias_E: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of what went in, the weights and the bias."""
    dout_NE = dout.reshape(-1, dout.shape[-1])
    dx = _product(dout_NE, weight_ED.t(), None).view(x.shape) if wanted[0] else None
    dweight_ED = dout_NE.t() @ x.reshape(-1, x.shape[-1]) if wanted[1] else None
    return dx, dweight_ED, dout_NE.sum(0) if bias_E is not None and wanted[2] else None
