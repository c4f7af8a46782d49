"""Spans that depend on the input: every head chooses at every token how far it looks back.

Shapes: B batch, T block, H heads, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from longspan.config import SpanConfig
from longspan.flops import Shape
from longspan.hooks import add_penalty
from longspan.layers.span import PenalisedSpan

LARGEST_BIAS = 4.0
"""At the start of training the bias lies between minus this and this; beyond, a sigmoid hardly learns."""


class DynamicSpan(PenalisedSpan):
    """Dynamic attention span (Sukhbaatar et al., 2019): z_t = limit * sigmoid(v . x_t + b).

    x_t is the input of the attention layer; every head has its own v and b, `direction_HD` and `bias_H`.
    v starts at 0, and b where z is `start` of the limit; the shortest start is sigmoid(-4), about 0.018.
    The soft edge and the weight of the penalty are those of a learned span; the penalty is on the mean of z_t
    over heads, texts and tokens. While training, the forward pass adds it (`hooks.add_penalty`).
    How far a head looks is known only on the device, after it has read x: windows and memory are as long as
    the limit. Kernels may cut the window of a query to its span.
    """

    last_2H: Tensor

    def __init__(
        self,
        width: int,
        num_heads: int,
        limit: int,
        *,
        ramp: int = 32,
        start: float = 0.0,
        penalty: float = 0.0,
        penalty_from: int = 0,
        penalty_full: int = 0,
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
        self.direction_HD = nn.Parameter(torch.zeros(num_heads, width))
        shortest = 1 / (1 + math.exp(LARGEST_BIAS))
        start = min(max(start, shortest), 1 - shortest)
        self.bias_H = nn.Parameter(torch.full((num_heads,), math.log(start / (1 - start))))
        # Mean and maximum of every head over the last block in training; zeros before the first.
        self.register_buffer("last_2H", torch.zeros(2, num_heads))

    @classmethod
    def from_config(cls, config: SpanConfig, num_heads: int, width: int) -> DynamicSpan:
        return cls(
            width,
            num_heads,
            config.limit,
            ramp=config.ramp,
            start=config.start,
            penalty=config.penalty,
            penalty_from=config.penalty_from,
            penalty_full=config.penalty_full,
            softmax_over=config.softmax_over,
            renormalise=config.renormalise,
            growth=config.growth,
        )

    def windows_for(self, block: int) -> tuple[int, ...]:
        return (self.limit,) * self._num_heads

    @property
    def caps(self) -> tuple[int, ...]:
        return (self.limit,) * self._num_heads

    @property
    def memory_length(self) -> int:
        return self.limit

    def forward(self, x_BTD: Tensor) -> Tensor:
        """z_t in tokens, without the ramp, [B, H, T]; in float32, because bf16 has no fractions of tokens."""
        with torch.autocast(x_BTD.device.type, enabled=False):
            exact = torch.promote_types(self.bias_H.dtype, torch.float32)
            logits_BTH = F.linear(x_BTD.to(exact), self.direction_HD.to(exact), self.bias_H.to(exact))
            return self.limit * self.cut(torch.sigmoid(logits_BTH)).transpose(1, 2)

    def penalty(self, spans_BHT: Tensor) -> Tensor:
        """The penalty on these spans, a scalar."""
        return self.ramped_in(self.penalty_weight * spans_BHT.mean())

    def spans_for(self, x_BTD: Tensor) -> Tensor:
        spans_BHT: Tensor = self(x_BTD)
        if self.training:
            add_penalty(self.penalty(spans_BHT))
            with torch.no_grad():
                sizes_BHT = self.sizes_of(spans_BHT)
                self.last_2H.copy_(torch.stack([sizes_BHT.mean((0, 2)), sizes_BHT.amax((0, 2))]))
        return spans_BHT

    @staticmethod
    def diagnostics_of(spans: Sequence[DynamicSpan]) -> dict[str, Tensor]:
        """Of all heads over the last block in training, in tokens and with the ramp."""
        last_2N = torch.cat([span.last_2H for span in spans], dim=1)
        return {"span_mean": last_2N[0].mean(), "span_max": last_2N[1].max()}

    @staticmethod
    def records_of(spans: Sequence[DynamicSpan]) -> dict[str, dict[str, Any]]:
        """The mean span of every head over the last block in training."""
        sizes = [span.last_2H[0].tolist() for span in spans]
        return {"spans": {"limit": max(span.limit for span in spans), "dynamic": True, "spans": sizes}}

    def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"span": [self.direction_HD, self.bias_H]}

    def flops(self, shape: Shape) -> float:
        return 2.0 * self.direction_HD.numel()
