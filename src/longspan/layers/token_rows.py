"""Rows of a small table, one for every token, with a fast backward pass on a GPU.

Shapes: V vocabulary, D width, N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MOST_ROWS = 512


def token_rows(tokens: Tensor, table_VD: Tensor) -> Tensor:
    """`F.embedding`: [...] -> [..., D]."""
    if table_VD.is_cuda and len(table_VD) <= MOST_ROWS:
        rows: Tensor = _TokenRows.apply(tokens, table_VD)  # type: ignore[no-untyped-call]
        return rows
    return F.embedding(tokens, table_VD)


class _TokenRows(torch.autograd.Function):
    """The gradient is a product with the one-hot matrix of the tokens.

    On a GPU the backward pass of `F.embedding` sorts the tokens, once for every table. With a small
    vocabulary the product takes less time.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table_VD: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.vocabulary_size = len(table_VD)
        return F.embedding(tokens, table_VD)

    @staticmethod
    def backward(ctx: Any, drows: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        drows_ND = drows.reshape(-1, drows.shape[-1])
        # Not `F.one_hot`, which synchronises to check the tokens and cannot be captured.
        words_V1 = torch.arange(ctx.vocabulary_size, device=tokens.device)[:, None]
        one_hot_VN = (words_V1 == tokens.flatten()).to(drows.dtype)
        return None, one_hot_VN @ drows_ND
