"""Rotary positions. Shapes: B batch, H heads, T block, K head width, E = K / 2."""

from __future__ import annotations

from longspan.layers.positions import Positions, Terms


class RotaryPositions(Positions):
    """RoPE (Su et al., 2021): position n turns the pair (x_i, x_{i+E}) of a query or key by n base^(-i/E).

    A query at m and a key at n then multiply to what depends on the content and on m - n alone: so any span,
    memory and length of text will do. Positions are counted from the beginning of the text, so what is
    remembered was turned once and for all; angles are computed in float64, exact however long the text is.
    """

    shared = False
    has_keys = False

    def __init__(self, base: float = 10000.0) -> None:
        super().__init__()
        self.base = base

    def terms(self, num_queries: int, window: int, heads: list[int]) -> Terms:
        return Terms()
