"""The picture of a context curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from longspan.inspection.curve_figure import _labels, draw_context_curve


def test_labels_do_not_overlap() -> None:
    assert [*_labels([16, 64, 256, 1024, 4096, 8192], 32768)] == [
        "16",
        "64",
        "256",
        "1,024",
        "4,096",
        "8,192",
    ]
    assert [*_labels([2, 3, 4, 4096, 8192, 10000], 40000)] == ["2", "3", "4", "4,096", "", "10,000"]
    close = [*_labels([64, 72, 80, 88, 96, 104, 112, 120, 128], 512)]
    assert close == ["64", "72", "80", "88", "96", "", "112", "", "128"]
    assert [*_labels([], 4)] == []


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
