"""What kernels drop is decided by a hash of where it stands and of a seed: nothing has to be kept of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def new_seed(device: torch.device) -> Tensor:
    """One number of torch's generator, on the device: a recorded step draws it anew."""
    return torch.randint(2**31, (1,), dtype=torch.int32, device=device)


@triton.jit
def mixed(x):
    """A hash of 32 bits in which every bit of x moves every other."""
    x = x.to(tl.uint32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def kept_places(row_key, place, threshold):
    """Which places of some rows dropout keeps; a row's key is its number and the seed, mixed."""
    x = (row_key[:, None] ^ place.to(tl.uint32)[None, :]) * 0x7FEB352D
    x ^= x >> 15
    return x * 0x846CA68B >= tl.cast(threshold, tl.uint32)  # a threshold of 1 is no tensor
