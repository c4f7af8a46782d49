"""The soft edge of a span, and the epsilon of the renormalisation after it."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-8


def soft_mask(spans: Tensor, ramp: int, window: int) -> Tensor:
    """m, [..., W], for the nearest `window` distances, nearest first: 1 inside the span, 0 beyond the ramp.

    At the nearest distance m is 1 even for a span of 0, which therefore still lets `ramp` positions through.
    Clamping passes the gradient at exactly 0 and 1: spans start on such a point.
    """
    steps_W = torch.arange(window, device=spans.device, dtype=spans.dtype)
    return ((spans[..., None] - steps_W) / ramp + 1).clamp(0, 1)
