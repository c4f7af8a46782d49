"""Dropout that is cheap in compiled code, and dropout that grows over epochs."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FRESH, STALE = 3, 19
"""Epochs without added dropout, and the first epoch, counted from 1, with all of it."""


class GrowingDropout(nn.Module):
    """Dropout that grows from `least` to `most` over the epochs.

    The probability is on the device, since a captured CUDA graph is replayed in every epoch.
    """

    probability: Tensor

    def __init__(self, least: float, most: float) -> None:
        super().__init__()
        self.least, self.most = least, most
        self.register_buffer("probability", torch.tensor(least), persistent=False)

    def begin_epoch(self, number: int) -> None:
        """Epochs count from 0."""
        grown = min(max((number + 1 - FRESH) / (STALE - FRESH), 0.0), 1.0)
        self.probability.fill_(self.least + (self.most - self.least) * grown)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return hashed_dropout(x, self.probability)
        probability = self.probability.item()
        return F.dropout(x, probability, probability > 0)


Dropout: TypeAlias = "float | GrowingDropout"
"""A fixed probability, or one that grows."""


def dropout(x: Tensor, probability: Dropout, training: bool) -> Tensor:
    """torch's dropout; in compiled code for a GPU, by a hash of the index of every element.

    There torch's generator takes longer than reading and writing the elements.
    """
    if isinstance(probability, GrowingDropout):
        return probability(x) if training else x
    if training and probability > 0 and x.is_cuda and torch.compiler.is_compiling():
        return hashed_dropout(x, probability)
    return F.dropout(x, probability, training)


def hashed_dropout(x: Tensor, probability: float | Tensor) -> Tensor:
    """Dropout by a 32-bit hash, seeded by one number of torch's generator."""
    seed = torch.randint(2**31, (), dtype=torch.int32, device=x.device)
    mixed = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape) ^ seed
    mixed = (mixed ^ _shifted(mixed, 16)) * 0x7FEB352D
    mixed = (mixed ^ _shifted(mixed, 15)) * (0x846CA68B - 2**32)
    limit = probability * 2**32 - 2**31
    kept = mixed >= (limit.to(torch.int32) if isinstance(limit, Tensor) else int(limit))
    return torch.where(kept, x * (1 / (1 - probability)), 0.0)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right, which torch does not have."""
    return (x >> bits) & (2 ** (32 - bits) - 1)
