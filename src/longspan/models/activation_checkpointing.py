"""Activation checkpointing: a block keeps only its input, and its backward pass computes the rest again.

Shapes: B batch, T block, D width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longspan.hooks import added_penalties
from longspan.state import State


def recomputed(block: nn.Module, h_BTD: Tensor, state: State, *more: Any) -> Any:
    """`block(h_BTD, state, *more)`, computed again in the backward pass with the same random numbers."""
    return checkpoint(block, h_BTD, state, *more, use_reentrant=False, context_fn=_contexts)


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Of the forward pass, and of computing it again: penalties of the second time are dropped."""
    return nullcontext(), added_penalties()
