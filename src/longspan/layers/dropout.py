"""Dropout that costs little where it is compiled together with what surrounds it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def dropout(x: Tensor, probability: float, training: bool) -> Tensor:
    """torch's dropout; in compiled code for a GPU, by a hash of the place of every number.

    There the generator of torch takes longer than reading and writing the numbers.
    """
    if training and probability > 0 and x.is_cuda and torch.compiler.is_compiling():
        return hashed_dropout(x, probability)
    return F.dropout(x, probability, training)


def hashed_dropout(x: Tensor, probability: float) -> Tensor:
    """Dropout by a hash of 32 bits, seeded by one number of torch's generator."""
    seed = torch.randint(2**31, (), dtype=torch.int32, device=x.device)
    mixed = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape) ^ seed
    mixed = (mixed ^ _shifted(mixed, 16)) * 0x7FEB352D
    mixed = (mixed ^ _shifted(mixed, 15)) * (0x846CA68B - 2**32)
    mixed = mixed ^ _shifted(mixed, 16)
    kept = mixed >= int(probability * 2**32) - 2**31
    return torch.where(kept, x / (1 - probability), 0.0)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifted right as numbers without a sign, which torch does not have."""
    return (x >> bits) & (2 ** (32 - bits) - 1)
