"""Adaptive attention span: every head learns how far back it looks.

After every update the spans are copied to the host asynchronously, where windows are derived from them; the
first reader synchronises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from longspan.config import SpanConfig
from longspan.layers.span import PenalisedSpan, Span, rounded_up

TRIM = 64
"""The original cuts attention and memory in multiples of this many positions."""


class LearnedSpan(PenalisedSpan):
    """Adaptive attention span (Sukhbaatar et al., 2019, section 3): head h sees about z_h * limit_h tokens.

    z in [0, 1] is learned; `fraction_H` holds one of each head, or a single one that the layer's heads share.
    The limit is the same for all heads, or grows geometrically from the first head to the last.
    Hooks compute the spans of all layers at once: one by one they would be a hundred small operations per
    step.

    The arguments are the options of `SpanConfig`. In a model and a loop of your own:

    | call | when |
    |---|---|
    | `span()` | in `forward`: the spans in tokens, [H], for `span_attention` |
    | `span.windows`, `span.ramp` | in `forward`: integer windows and the soft edge, for `span_attention` |
    | `span.memory_length` | how many positions before the block to remember |
    | `span.penalty()` | add it to the loss |
    | `span.clamp_()` | after every optimizer step; the windows follow the spans only then |
    | `span.progress(done)` | with `growth`, before every step: the fraction of the training that is done |
    """

    def __init__(
        self,
        num_heads: int,
        limit: int,
        *,
        ramp: int = 32,
        start: float = 0.0,
        penalty: float = 0.0,
        per: Literal["head", "layer"] = "head",
        limit_shortest: int | None = None,
        penalty_from: int = 0,
        penalty_full: int = 0,
        memory: Literal["adaptive", "full"] = "adaptive",
        softmax_over: Literal["head", "layer"] = "head",
        renormalise: bool = True,
        growth: Sequence[float] = (),
    ) -> None:
        super().__init__(
            num_heads,
            limit,
            ramp=ramp,
            start=start,
            penalty=penalty,
            penalty_from=penalty_from,
            penalty_full=penalty_full,
            softmax_over=softmax_over,
            renormalise=renormalise,
            growth=growth,
        )
        self._full_memory = memory == "full"
        self._over_layer = softmax_over == "layer"
        self._copy: _SizesCopy | None = None
        self.limits = _limits(num_heads, limit, limit_shortest)
        own = num_heads if per == "head" else 1
        self.fraction_H = nn.Parameter(torch.full((own,), float(start)))
        self.set_fractions([start] * num_heads)

    @classmethod
    def from_config(cls, config: SpanConfig, num_heads: int) -> LearnedSpan:
        return cls(
            num_heads,
            config.limit,
            ramp=config.ramp,
            start=config.start,
            penalty=config.penalty,
            per=config.per,
            limit_shortest=config.limit_shortest,
            penalty_from=config.penalty_from,
            penalty_full=config.penalty_full,
            memory=config.memory,
            softmax_over=config.softmax_over,
            renormalise=config.renormalise,
            growth=config.growth,
        )

    def forward(self) -> Tensor:
        """The spans in tokens, [H], without the ramp."""
        return self._in_tokens(self.cut(self.fractions_H()))

    def penalty(self) -> Tensor:
        """The penalty of this layer, a scalar to add to the loss."""
        return span_penalty([self])

    def clamp_(self) -> None:
        """Put every z back into [0, 1] and update the windows; call it after every optimizer step."""
        self.after_update()
        clamp_and_read([self])

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        read_sizes([self])  # a plain loop knows nothing of `refresh`

    @property
    def windows(self) -> tuple[int, ...]:
        self._await_sizes()
        return self._windows

    def windows_for(self, block: int) -> tuple[int, ...]:
        return self.windows

    @property
    def caps(self) -> tuple[int, ...]:
        if self._over_layer:
            return (self.limit,) * self._num_heads
        # The soft edge lies beyond the span, and one position beyond that may still pass a gradient.
        return tuple(min(self.limit, limit + self.ramp + 1) for limit in self.limits)

    @property
    def memory_length(self) -> int:
        self._await_sizes()
        return self._memory_length

    def _await_sizes(self) -> None:
        if self._copy is not None:
            self._copy.wait()

    def __getstate__(self) -> dict[str, Any]:
        """Before a module is copied, wait for its sizes: the copy must not share a pending transfer."""
        self._await_sizes()
        return self.__dict__

    def fractions_H(self) -> Tensor:
        """z of each head."""
        return self.fraction_H.expand(self._num_heads)

    def spans_for(self, x_BTD: Tensor) -> Tensor:
        return self.forward()

    @staticmethod
    def penalties_of(spans: Sequence[LearnedSpan]) -> dict[str, Tensor]:
        return {"span": span_penalty(spans)}

    @staticmethod
    def refresh_of(spans: Sequence[LearnedSpan]) -> None:
        clamp_and_read(spans)

    @staticmethod
    def diagnostics_of(spans: Sequence[LearnedSpan]) -> dict[str, Tensor]:
        """The spans in tokens, [L, H], where all layers have as many heads; their mean and the longest."""
        sizes = [span.sizes_H() for span in spans]
        all_sizes = torch.cat(sizes)
        seen = {"span_mean": all_sizes.mean(), "span_max": all_sizes.max()}
        if len({len(sizes_H) for sizes_H in sizes}) == 1:
            seen["spans_LH"] = torch.stack(sizes)
        return seen

    @staticmethod
    def records_of(spans: Sequence[LearnedSpan]) -> dict[str, dict[str, Any]]:
        sizes = _of_each(spans, torch.cat([span.sizes_H() for span in spans]))
        return {"spans": {"limit": max(span.limit for span in spans), "spans": sizes}}

    def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"span": [self.fraction_H]}

    def sizes_H(self) -> Tensor:
        """How many tokens each head can see, the ramp included."""
        part = 1.0 if self.growth is None else self.growth.part
        return self.sizes_of(self._in_tokens(self.fractions_H().detach().double().clamp(max=part)))

    def _in_tokens(self, fractions_H: Tensor) -> Tensor:
        if min(self.limits) == self.limit:
            return fractions_H * self.limit
        return fractions_H * _on_device(self.limits, fractions_H.device)

    def set_fractions(self, fractions: Sequence[float]) -> None:
        """Derive the integer sizes from z of each head, given on the host."""
        self._fractions = tuple(fractions)
        part = 1.0 if self.growth is None else self.growth.part
        reaches = self._reaches([min(z, part) for z in fractions])
        memory_length = self._layer_window(self._reaches(fractions)) + TRIM
        if self._over_layer:
            self._windows = (self._layer_window(reaches),) * len(fractions)
        else:
            # One beyond the last visible position: the mask is 0 there but may still pass a gradient.
            self._windows = tuple(min(self.limit, rounded_up(reach + 1)) for reach in reaches)
            memory_length = rounded_up(memory_length)
        self._memory_length = self.limit if self._full_memory else min(self.limit, memory_length)

    def part_changed(self) -> None:
        self.set_fractions(self._fractions)  # if newer ones are on their way, they are set on arrival

    def _reaches(self, fractions: Sequence[float]) -> list[int]:
        """How far heads with these z look back, the ramp included."""
        return [math.ceil(z * limit) + self.ramp for z, limit in zip(fractions, self.limits, strict=True)]

    def _layer_window(self, reaches: Sequence[int]) -> int:
        """The longest of them, in the original's steps."""
        longest = min(self.limit, max(reaches))
        return self.limit - TRIM * (min(self.limit - 1, self.limit - longest) // TRIM)


class _SizesCopy:
    """z of all heads of all layers on the way to the host: one asynchronous copy. N heads of all layers."""

    def __init__(self, spans: Sequence[LearnedSpan], fractions_N: Tensor) -> None:
        self._spans = spans
        self._fractions_N = torch.empty_like(fractions_N, device="cpu", pin_memory=True)
        self._fractions_N.copy_(fractions_N, non_blocking=True)
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(fractions_N.device))

    def wait(self) -> None:
        self._done.synchronize()
        _set_sizes(self._spans, self._fractions_N)


def span_penalty(spans: Sequence[LearnedSpan]) -> Tensor:
    """The span penalty: sum of weight * mean over heads of z * limit; while it ramps in, a part of it.

    Layers with the same settings are computed at once; usually these are all layers.
    """
    alike: dict[Any, list[LearnedSpan]] = {}
    for span in spans:
        grows = span.updates is not None
        ramps_in = span._free, span._ramp_in, grows
        settings = span.limit, span.limits, span.penalty_weight, ramps_in, _parts(span)
        alike.setdefault(settings, []).append(span)
    return reduce(torch.add, map(_penalty_of_alike, alike.values()))


def _penalty_of_alike(spans: Sequence[LearnedSpan]) -> Tensor:
    any_of_them = spans[0]
    fractions_LH = torch.stack([span.fractions_H() for span in spans])
    tokens_LH = any_of_them._in_tokens(any_of_them.cut(fractions_LH))
    return any_of_them.ramped_in(any_of_them.penalty_weight * tokens_LH.mean(dim=1).sum())


def _parts(span: Span) -> tuple[float, ...]:
    return () if span.growth is None else span.growth.parts


def clamp_and_read(spans: Sequence[LearnedSpan]) -> None:
    """Put every z back into [0, 1] and start the copy of z that the integer sizes are derived from."""
    with torch.no_grad():
        fractions: list[Tensor] = [span.fraction_H for span in spans]
        torch._foreach_clamp_min_(fractions, 0.0)
        torch._foreach_clamp_max_(fractions, 1.0)
    read_sizes(spans)


@torch.no_grad()
def read_sizes(spans: Sequence[LearnedSpan]) -> None:
    """Start the copy of z that the integer sizes are derived from."""
    fractions_N = torch.cat([span.fractions_H() for span in spans])
    if fractions_N.is_cuda:
        copy = _SizesCopy(spans, fractions_N)
        for span in spans:
            span._copy = copy
    elif not fractions_N.is_meta:
        _set_sizes(spans, fractions_N)


def _of_each(spans: Sequence[LearnedSpan], values_N: Tensor) -> list[list[float]]:
    """The values of every layer's heads, after one copy to the host."""
    values = iter(values_N.tolist())
    return [[next(values) for _ in range(span._num_heads)] for span in spans]


def _set_sizes(spans: Sequence[LearnedSpan], fractions_N: Tensor) -> None:
    for span, fractions in zip(spans, _of_each(spans, fractions_N), strict=True):
        span._copy = None
        if not any(map(math.isnan, fractions)):  # a diverged model has no sizes; the loss reports it
            span.set_fractions(fractions)


@cache  # never freed: a captured CUDA graph reads them at their address
def _on_device(limits: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached: training needs it too, even if inference creates it
        return torch.tensor(limits, device=device)


def _limits(num_heads: int, limit: int, shortest: int | None) -> tuple[int, ...]:
    """shortest (limit / shortest)^(h / (H - 1)) for head h of H."""
    ratio = 1.0 if shortest is None else (limit / shortest) ** (1 / max(1, num_heads - 1))
    return tuple(round(limit / ratio**steps) for steps in reversed(range(num_heads)))
