"""The picture of a context curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from longspan.inspection.curve_figure import draw_context_curve


@pytest.mark.parametrize(
    ("bits", "height"), [([1.5, 1.499, 1.499], 0.1), ([2.0, 1.5, 1.5], 0.55), ([1.0, 1.0, 1.0], 0.11)]
)
def test_a_flat_curve_looks_flat(
    bits: list[float], height: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heights = []
    save = Figure.savefig

    def saved(figure: Figure, *arguments: Any, **options: Any) -> None:
        low, high = figure.axes[0].get_ylim()
        heights.append(high - low)
        assert low < min(bits) <= max(bits) < high
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    draw_context_curve([16, 64], bits, tmp_path / "curve.svg", title="flat")
    assert heights == [pytest.approx(height)]
    assert "bits per byte" in (tmp_path / "curve.svg").read_text()
