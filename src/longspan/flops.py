"""FLOPs of the forward pass per token; a multiply-add counts as two.

Counted are matrix products: projections (also of the memory, if it is projected again in every block), scores
of content and distance and weighted sums over the window of each head, persistent vectors, the output head.
Norms, softmax and dropout are not counted. An adaptive softmax counts all clusters, as if all probabilities
were computed; in training it costs less, because a rare cluster is computed only for its own tokens. A window
counts in full, even if a block or a context starts within it.

A module declares its FLOPs in a method `flops(shape)`. Without it, those of the modules inside are summed.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from longspan.hooks import has

_ONE_MATRIX = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


class Shape(NamedTuple):
    """The shape of a block of tokens: work done once per batch or block is divided by its tokens."""

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
