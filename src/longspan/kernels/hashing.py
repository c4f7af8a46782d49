"""Dropout by a hash of the position and a seed: no mask has to be stored for the backward pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def new_seed(device: torch.device) -> Tensor:
    """A number of torch's generator, on the device: a replayed CUDA graph draws a new one."""
    return torch.randint(2**31, (1,), dtype=torch.int32, device=device)


@triton.jit
def mixed(x):
    """A 32-bit hash in which every bit of x affects every bit of the result."""
    x = x.to(tl.uint32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def kept_places(row_key, place, threshold):
    """Which columns of some rows dropout keeps; a row's key is a hash of its number and the seed."""
    x = (row_key[:, None] ^ place.to(tl.uint32)[None, :]) * 0x7FEB352D
    x ^= x >> 15
    return x * 0x846CA68B >= tl.cast(threshold, tl.uint32)  # a threshold of 1 is no tensor
