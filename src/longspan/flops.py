"""FLOPs of the forward pass per token, two for each multiplication with an addition.

Products of matrices are counted: projections (of the memory too, where it is projected again in every block),
scores of content and distance and weighted sums over the window of each head, persistent vectors, the output
head. Norms, softmax and dropout are not. An adaptive softmax counts all clusters, as when all probabilities
are computed; in training it computes a rare cluster only for its own tokens, and costs less. A window counts
in full, also where a block or a context begins within it.

A module says its FLOPs in a method `flops(shape)`. Without one it costs what the modules inside it cost.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from longspan.hooks import has

_ONE_MATRIX = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


class Shape(NamedTuple):
    """What is read at once: work that is done once for a batch or a block is shared by its tokens."""

    batch_size: int
    block_length: int
    context: int | None = None  # a text is cut into contexts of this many tokens


def flops(module: nn.Module, shape: Shape) -> float:
    """FLOPs per token of a module with everything inside it."""
    if has(module, "flops"):
        return float(module.flops(shape))  # type: ignore[operator]
    if isinstance(module, _ONE_MATRIX):
        return 2.0 * module.weight.numel()
    if isinstance(module, _RECURRENT):
        return sum(2.0 * weight.numel() for weight in module.parameters() if weight.ndim == 2)
    return flops_inside(module, shape)


def flops_inside(module: nn.Module, shape: Shape) -> float:
    """FLOPs per token of the modules inside a module."""
    return sum((flops(child, shape) for child in module.children()), 0.0)
