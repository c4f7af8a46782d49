"""Pictures of a search: the data they show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from longspan.inspection import ArchitectureHistory, animate_architecture, draw_architecture
from longspan.inspection.architecture_figure import _figure, frame_moments

PROBABILITIES_BK = np.array([[0.7, 0.2, 0.1], [0.25, 0.4, 0.35]])


def history(moments: int) -> ArchitectureHistory:
    probabilities_NBK = np.random.default_rng(0).dirichlet(np.ones(3), (moments, 2))
    return ArchitectureHistory(
        "hunt", "sfi", np.arange(moments), np.linspace(1, 0.1, moments), probabilities_NBK
    )


def test_blocks_across_candidates_down_probability_as_darkness() -> None:
    (axes,) = _figure(PROBABILITIES_BK, "sfi", "hunt: sf").axes
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), PROBABILITIES_BK.T)
    assert image.get_clim() == (0.0, 1.0)
    likely, unlikely = image.cmap(image.norm([0.9, 0.1]))
    assert likely[:3].max() < unlikely[:3].min()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2"]
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["attention  s", "feed-forward  f", "identity  i"]
    assert axes.get_title(loc="left") == "hunt: sf"


def test_only_the_most_likely_have_their_number_written_in() -> None:
    (axes,) = _figure(PROBABILITIES_BK, "sfi", "").axes
    written = {tuple(text.get_position()): text.get_text() for text in axes.texts}
    assert written == {(0, 0): "0.70", (1, 1): "0.40"}


def test_the_picture_is_a_whole_png(tmp_path: Path) -> None:
    draw_architecture(PROBABILITIES_BK, "sfi", "hunt", tmp_path / "architecture.png")
    with Image.open(tmp_path / "architecture.png") as picture:
        picture.load()
        assert picture.format == "PNG"
    assert [entry.name for entry in tmp_path.iterdir()] == ["architecture.png"]


@pytest.mark.parametrize(
    ("moments", "frames"), [(1, [0]), (3, [0, 1, 2]), (60, [*range(60)]), (119, [*range(0, 60, 2)])]
)
def test_which_moments_are_frames(moments: int, frames: list[int]) -> None:
    chosen = frame_moments(moments)
    assert chosen[: len(frames)] == frames
    assert chosen[-1] == moments - 1
    assert len(chosen) == min(moments, 60)


@pytest.mark.parametrize("moments", [1, 4])
def test_the_animation_ends_with_a_rest_and_begins_again(tmp_path: Path, moments: int) -> None:
    animate_architecture(history(moments), tmp_path / "architecture.gif")
    with Image.open(tmp_path / "architecture.gif") as animation:
        assert animation.format == "GIF"
        assert getattr(animation, "n_frames", 1) == moments
        animation.seek(moments - 1)
        assert moments == 1 or animation.info["duration"] == 2000
        assert moments == 1 or animation.info["loop"] == 0
