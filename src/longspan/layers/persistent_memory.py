"""Persistent vectors: learned keys and values. Shapes: H heads, P vectors, K head width."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from longspan.layers.select_heads import select_heads


class PersistentMemory(nn.Module):
    """Learned keys and values per head, in the same softmax as those of the text.

    They replace the feed-forward layer ("Augmenting Self-attention with Persistent Memory", Sukhbaatar et
    al., 2019, section 3): knowledge that does not depend on the text. Keys are multiplied by sqrt(K) and
    values by sqrt(P) when they are used; their initial values are divided by the same factors.
    """

    def __init__(self, num_heads: int, size: int, head_width: int) -> None:
        super().__init__()
        self.keys_HPK = nn.Parameter(torch.randn(num_heads, size, head_width) / math.sqrt(head_width))
        self.values_HPK = nn.Parameter(torch.randn(num_heads, size, head_width) / math.sqrt(size))

    def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"no_decay": [self.keys_HPK, self.values_HPK]}

    def forward(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads as attention uses them, [H, P, K] each."""
        return self.of(list(range(self.keys_HPK.shape[0])))

    def of(self, heads: list[int]) -> tuple[Tensor, Tensor]:
        """Keys and values of some of the heads, as attention uses them."""
        num_persistent, head_width = self.keys_HPK.shape[1:]
        return (
            select_heads(self.keys_HPK, heads) * math.sqrt(head_width),
            select_heads(self.values_HPK, heads) * math.sqrt(num_persistent),
        )
