"""Where a head may look: what all kinds of span have in common, and fixed windows.

`learned_span.py` has a span for every head, `dynamic_span.py` spans that follow the input. A span module says
how far each head must be computed now (`windows_for`) and how far it may ever look (`caps`), how much must be
remembered (`memory_length`), and which soft edge the kernel applies (`spans_for`, `ramp`). All but the spans
are plain integers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from longspan.errors import UserError
from longspan.layers.growth import Growth

WINDOW_STEP = 16
"""Short windows are rounded up to a multiple of this, see `rounded_up`, and so are windows that grow."""


class Span(nn.Module, ABC):
    """Where the heads of one layer may look."""

    ramp: int = 1
    renormalise: bool = True
    is_soft: bool = False
    """Whether heads have spans, with a soft edge, and not only windows."""
    windows_follow_spans: bool = False
    """Whether a head's window may be cut to what its span lets through."""
    growth: Growth | None
    """Which part of that a head sees now; None for all of it. What is remembered does not depend on it."""

    def __init__(self, growth: Sequence[float] = ()) -> None:
        super().__init__()
        self.growth = Growth(growth) if growth else None

    def progress(self, done: float) -> None:
        if self.growth is not None and self.growth.follow(done):
            self.part_changed()

    def part_changed(self) -> None:
        """Called when `growth` has another part."""

    @abstractmethod
    def windows_for(self, block: int) -> tuple[int, ...]:
        """For each head, how many distances must be computed for a block of this many tokens."""

    @property
    @abstractmethod
    def caps(self) -> tuple[int, ...]:
        """For each head, how many positions before the block it will ever need."""

    @property
    @abstractmethod
    def memory_length(self) -> int:
        """How many positions before the block must be remembered now."""

    @abstractmethod
    def spans_for(self, x_BTD: Tensor) -> Tensor | None:
        """Spans in tokens, without the ramp: [H], or [B, H, T] if they depend on x; None without a soft edge.

        x is the input of the attention layer.
        """


class FixedSpan(Span):
    """Every head sees exactly the `limit` nearest positions, or those in a window of its own."""

    def __init__(self, num_heads: int, limit: int, growth: Sequence[float] = ()) -> None:
        super().__init__(growth)
        self._windows = (limit,) * num_heads

    def windows_for(self, block: int) -> tuple[int, ...]:
        if self.growth is None:
            return self._windows
        return tuple(self.growth.window(window, WINDOW_STEP) for window in self._windows)

    def set_windows(self, windows: Sequence[int]) -> None:
        """Let every head see this many positions."""
        if len(windows) != len(self._windows):
            raise UserError(
                f"the windows of a layer must be {len(self._windows)}, one for every head, not {len(windows)}"
            )
        self._windows = tuple(windows)

    @property
    def caps(self) -> tuple[int, ...]:
        return self._windows

    @property
    def memory_length(self) -> int:
        return max(self._windows)

    def spans_for(self, x_BTD: Tensor) -> None:
        return None


class WholeMemory(Span):
    """Every query sees all of the memory, and the block up to itself: later queries see further back."""

    def __init__(self, memory_length: int, num_heads: int) -> None:
        super().__init__()
        self._memory_length = memory_length
        self._num_heads = num_heads

    def windows_for(self, block: int) -> tuple[int, ...]:
        return (self._memory_length + block,) * self._num_heads

    @property
    def caps(self) -> tuple[int, ...]:
        return (self._memory_length,) * self._num_heads

    @property
    def memory_length(self) -> int:
        return self._memory_length

    def spans_for(self, x_BTD: Tensor) -> None:
        return None


class PenalisedSpan(Span):
    """Spans that are penalised: a loss per token of mean span.

    A penalty that ramps in counts the updates in a tensor, saved with the weights, so that a resumed run
    continues the ramp.
    """

    is_soft = True
    updates: Tensor | None

    def __init__(
        self,
        num_heads: int,
        limit: int,
        *,
        ramp: int,
        start: float,
        penalty: float,
        penalty_from: int,
        penalty_full: int,
        softmax_over: Literal["head", "layer"],
        renormalise: bool,
        growth: Sequence[float] = (),
    ) -> None:
        super().__init__(growth)
        if min(num_heads, limit, ramp) < 1 or not 0.0 <= start <= 1.0:
            raise UserError("num_heads, limit and ramp must be at least 1, and start between 0 and 1")
        self.limit = limit
        self.ramp = ramp
        self.renormalise = renormalise
        self.penalty_weight = penalty
        self.windows_follow_spans = softmax_over == "head"
        self._num_heads = num_heads
        self._free = penalty_from
        self._ramp_in = max(0, penalty_full - penalty_from) + 1
        grows = penalty_from or penalty_full
        self.register_buffer("updates", torch.zeros((), dtype=torch.long) if grows else None)

    def after_update(self) -> None:
        if self.updates is not None:
            self.updates += 1

    def ramped_in(self, penalty: Tensor) -> Tensor:
        """The part of a penalty that counts now."""
        if self.updates is None:
            return penalty
        return penalty * ((self.updates + 1 - self._free) / self._ramp_in).clamp(0, 1)

    def cut(self, fractions: Tensor) -> Tensor:
        """The part of spans, as fractions of their limit, that is seen now."""
        return fractions if self.growth is None else self.growth.cut(fractions)

    def sizes_of(self, spans: Tensor) -> Tensor:
        """How many tokens heads can see that have these spans, the ramp included."""
        return spans.ceil().add(self.ramp).clamp(max=self.limit)


def rounded_up(length: int) -> int:
    """To one of 8 steps between powers of two, or by 16 below 256: shapes change rarely while spans move."""
    step = max(WINDOW_STEP, 2 ** ((length - 1).bit_length() - 4))
    return step * math.ceil(length / step)
