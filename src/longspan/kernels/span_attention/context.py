"""The arguments of attention besides the queries, keys and values of the block, and the soft mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-8  # of the renormalisation after the mask


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """The past of every head and the options of attention, for all backends.

    Heads come in groups, as `head_groups` forms them. Shapes are those of the package.

    | field | meaning |
    |---|---|
    | `past` | for every group the keys of its heads and then their values, [B, M, X, K], oldest first |
    | `windows` | for every head how many distances it sees |
    | `position_keys` | p_d, [L, K], or one table for every head, [H, L, K]; row i is distance first + i |
    | `content_bias_HK` | u, added to queries for the product with keys |
    | `position_bias_HK` | v, added to queries for the product with position keys |
    | `position_map_HKE` | M: then `position_keys` are e_d, [L, E], and p_d = M e_d |
    | `persistent` | keys and values of the persistent vectors, [H, P, K] each |
    | `filled_B` | how many of the last rows of the past belong to the text; needs `first_distance` 0 |
    | `spans` | spans in tokens, [H], or of every query, [B, H, T]; they get a gradient |
    | `ramp` | width of the soft edge of a span |
    | `renormalise` | whether weights are divided by their sum after the soft mask |
    | `first_distance` | 0 if a query sees its own position, else 1 |
    | `dropout` | probability with which a weight is dropped |
    | `windows_follow_spans` | whether a backend may cut a window to its span |
    """

    past: Sequence[Tensor]
    windows: Sequence[int]
    position_keys: Tensor | None = None
    content_bias_HK: Tensor | None = None
    position_bias_HK: Tensor | None = None
    position_map_HKE: Tensor | None = None
    persistent: tuple[Tensor, Tensor] | None = None
    filled_B: Tensor | None = None
    spans: Tensor | None = None
    ramp: int = 1
    renormalise: bool = True
    first_distance: int = 1
    dropout: float = 0.0
    windows_follow_spans: bool = False

    def __post_init__(self) -> None:
        if self.filled_B is not None and self.first_distance != 0:
            raise ValueError("with filled_B a query must see itself: first_distance must be 0")

    @property
    def group_sizes(self) -> list[int]:
        """The number of heads of every group."""
        return [kv_BMXK.shape[2] // 2 for kv_BMXK in self.past]

    def groups(self) -> Iterator[tuple[slice, AttentionContext]]:
        """The heads and the part of the context of every group."""
        start = 0
        for kv_BMXK, size in zip(self.past, self.group_sizes, strict=True):
            heads = slice(start, start + size)
            start = heads.stop
            if size == len(self.windows):
                yield heads, self
            else:
                yield heads, self._of(kv_BMXK, heads)

    def _of(self, kv_BMXK: Tensor, heads: slice) -> AttentionContext:
        def part(x_H: Tensor | None) -> Tensor | None:
            return None if x_H is None else x_H[heads]

        keys, spans = self.position_keys, self.spans
        return dataclasses.replace(
            self,
            past=[kv_BMXK],
            windows=self.windows[heads],
            position_keys=keys if keys is None or keys.dim() == 2 else keys[heads],
            content_bias_HK=part(self.content_bias_HK),
            position_bias_HK=part(self.position_bias_HK),
            position_map_HKE=part(self.position_map_HKE),
            persistent=None
            if self.persistent is None
            else (self.persistent[0][heads], self.persistent[1][heads]),
            spans=part(spans) if spans is None or spans.dim() == 1 else spans[:, heads],
        )

    def content_queries(self, q_BHTK: Tensor) -> Tensor:
        """q + u: what is multiplied with keys."""
        return _biased(q_BHTK, self.content_bias_HK)

    def position_queries(self, q_BHTK: Tensor) -> Tensor:
        """(q + v) or (q + v) M: what is multiplied with `position_keys`, [B, H, T, K] or [B, H, T, E]."""
        asked_BHTK = _biased(q_BHTK, self.position_bias_HK)
        return asked_BHTK if self.position_map_HKE is None else asked_BHTK @ self.position_map_HKE

    def mapped_position_keys(self) -> Tensor | None:
        """p_d, also if they are given as M and e_d: [L, K] or [H, L, K]."""
        if self.position_keys is None or self.position_map_HKE is None:
            return self.position_keys
        return self.position_keys @ self.position_map_HKE.mT


def _biased(q_BHTK: Tensor, bias_HK: Tensor | None) -> Tensor:
    return q_BHTK if bias_HK is None else q_BHTK + bias_HK.to(q_BHTK.dtype)[:, None]


def soft_mask(spans: Tensor, ramp: int, window: int) -> Tensor:
    """m, [..., W], for the nearest `window` distances, nearest first: 1 inside the span, 0 beyond the ramp.

    At the nearest distance m is 1 even for a span of 0, which therefore still lets `ramp` positions through.
    Clamping passes the gradient at exactly 0 and 1: spans start on such a point.
    """
    steps_W = torch.arange(window, device=spans.device, dtype=spans.dtype)
    return ((spans[..., None] - steps_W) / ramp + 1).clamp(0, 1)
