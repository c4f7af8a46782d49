"""Rotary positions. Shapes: B batch, H heads, T block, K head width, E = K / 2."""

from __future__ import annotations

from longspan.kernels.qk_norm_rope import Rope
from longspan.layers.positions import Positions, Terms


class RotaryPositions(Positions):
    """RoPE (Su et al., 2021): position n rotates the pair (x_i, x_{i+E}) of a query or key by n base^(-i/P).

    The product of a query at m and a key at n then depends only on the content and on m - n: any span, memory
    and length of text is possible. Positions are counted from the beginning of the text, so keys in memory
    are not rotated again. Only the first P = round(fraction E) pairs are rotated; the others match by content
    at any distance. Angles are computed in float64, which is exact for texts of any length.
    """

    shared = False
    has_keys = False

    def __init__(self, base: float = 10000.0, fraction: float = 1.0) -> None:
        super().__init__()
        self.rope = Rope(base, fraction)

    def terms(self, num_queries: int, window: int, heads: list[int]) -> Terms:
        return Terms()
