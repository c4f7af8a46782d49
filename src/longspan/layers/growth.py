"""Windows that grow while a model is trained: at first heads see only a part of what they may see later."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Growth(nn.Module):
    """Which part of its window or limit a head sees: `parts[i]` in the i-th of equal parts of a training.

    Without a training it is all. It has no weights: the part follows from how much of the training is done.
    It is on the device too, since a captured CUDA graph is replayed while it grows.
    """

    seen: Tensor

    def __init__(self, parts: Sequence[float]) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.part = 1.0
        self.register_buffer("seen", torch.ones(()), persistent=False)

    def follow(self, done: float) -> bool:
        """Take over what belongs to this fraction of the training; whether it is another part."""
        # The fraction is a quotient: just below the border of two parts it may be the border.
        number = min(len(self.parts) - 1, int(done * len(self.parts) + 1e-9))
        changed = self.parts[number] != self.part
        if changed:
            self.part = self.parts[number]
            self.seen.fill_(self.part)
        return changed

    def window(self, length: int, step: int) -> int:
        """The part of a window that is seen, rounded up to a multiple of `step`."""
        return min(length, step * max(1, math.ceil(length * self.part / step)))

    def cut(self, fractions: Tensor) -> Tensor:
        """Spans, as fractions of their limit, up to the part that is seen; if cut, they get no gradient."""
        return fractions.clamp(max=self.seen)
