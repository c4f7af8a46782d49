"""The polynomials of Polar Express: derived again, and what they do to singular values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from longspan.optim.polar import _OPTIMAL, POLAR_EXPRESS, SAFETY, orthogonal

LOWEST, CUSHION = 1e-3, 0.02407327424182761  # of the published polynomials


def best_quintic(low: float, high: float) -> np.ndarray:
    """The a x + b x³ + c x⁵ whose largest distance from 1 on [low, high] is smallest, by Remez exchange."""
    points = np.linspace(low, high, 4)
    for _ in range(100):
        a, b, c, _error = np.linalg.solve(
            np.stack([points, points**3, points**5, np.array([1.0, -1.0, 1.0, -1.0])], axis=1), np.ones(4)
        )
        extremes = np.sqrt((-3 * b + np.array([-1, 1]) * np.sqrt(9 * b * b - 20 * a * c)) / (10 * c))
        points, before = np.array([low, *extremes, high]), points
        if np.abs(points - before).max() < 1e-15:
            break
    return np.array([a, b, c])


def test_each_polynomial_is_the_best_where_the_one_before_ends() -> None:
    """A lower end far below the upper one is raised to a cushion: small values then grow faster."""
    low, high = LOWEST, 1.0
    for given in _OPTIMAL:
        found = best_quintic(max(low, CUSHION * high), high)

        def at(x: float, found: np.ndarray = found) -> float:
            return float(found @ np.array([x, x**3, x**5]))

        if low < CUSHION * high:
            found *= 2 / (at(low) + at(high))  # centred around 1
        np.testing.assert_allclose(given, found, rtol=1e-12)
        low = at(low, found)
        high = 2 - low
    assert low == pytest.approx(0.876441, abs=1e-6)


def test_singular_values_end_in_a_narrow_band() -> None:
    s = np.geomspace(0.002, 1.0, 100_001) / SAFETY
    for a, b, c in POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    assert s.min() > 0.876
    assert s.max() < 1.124


@pytest.mark.parametrize("shape", [(20, 8), (8, 20), (12, 12)])
def test_matrices_with_small_singular_values_become_orthogonal(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    count = min(shape)
    left, _ = torch.linalg.qr(torch.randn(shape[0], count, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(shape[1], count, generator=generator, dtype=torch.float64))
    x = left @ torch.diag(torch.logspace(-2.5, 0, count, dtype=torch.float64)) @ right.T * 7
    inner = left.T @ orthogonal(x[None], POLAR_EXPRESS, SAFETY)[0] @ right
    found = inner.diagonal()
    torch.testing.assert_close(inner, torch.diag(found), atol=1e-9, rtol=0)
    assert found.min() > 0.87
    assert found.max() < 1.13


def test_rounding_does_not_leave_the_interval() -> None:
    """All singular values equal, the largest that rounding in bfloat16 can exceed."""
    x = torch.eye(64)[None].bfloat16()
    found = orthogonal(x, POLAR_EXPRESS, SAFETY).float()
    assert (found.diagonal(dim1=1, dim2=2) - 1).abs().max() < 0.15
    one = torch.zeros(1, 16, 16, dtype=torch.bfloat16)
    one[0, 0, 0] = 3.0  # rank 1: its only singular value is the norm
    assert abs(float(orthogonal(one, POLAR_EXPRESS, SAFETY)[0, 0, 0]) - 1) < 0.15
