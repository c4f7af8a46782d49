"""The picture of a search (blocks across, candidates down, darker is more likely), and its animation.

Shapes: B blocks, K candidates.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from PIL import Image

from longspan.files import whole_file
from longspan.inspection.architecture import ArchitectureHistory
from longspan.progress import task
from longspan.registry import BLOCKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#333333"
PALE = "#ffffff"
MAX_FRAMES = 60
FRAME_SECONDS, LAST_SECONDS = 0.12, 2.0
CELL, MARGIN = 0.75, 1.6  # inches


def draw_architecture(
    probabilities_BK: npt.NDArray[np.float64], candidates: str, title: str, path: Path
) -> None:
    """Write the picture of one distribution as PNG."""
    figure = _figure(probabilities_BK, candidates, title)
    with whole_file(path) as partial:
        figure.savefig(partial, format="png", dpi=150)


def animate_architecture(history: ArchitectureHistory, path: Path) -> None:
    """Write the whole history as GIF, in at most `MAX_FRAMES` frames."""
    moments, frames = frame_moments(len(history.steps_N)), []
    with task("drawing", "frames", len(moments)) as progress:
        for moment in moments:
            frames.append(_frame(history, moment))
            progress(len(frames))
    milliseconds = [round(1000 * FRAME_SECONDS)] * (len(frames) - 1) + [round(1000 * LAST_SECONDS)]
    with whole_file(path) as partial:
        frames[0].save(
            partial, format="GIF", save_all=True, append_images=frames[1:], duration=milliseconds, loop=0
        )


def frame_moments(num_moments: int) -> list[int]:
    """Which log steps become frames: the first, the last, and evenly spaced ones between."""
    return np.unique(
        np.linspace(0, num_moments - 1, min(num_moments, MAX_FRAMES)).round().astype(int)
    ).tolist()


def _frame(history: ArchitectureHistory, moment: int) -> Image.Image:
    title = (
        f"{history.name}: step {history.steps_N[moment]:,}, temperature {history.temperatures_N[moment]:.2f}"
    )
    picture = io.BytesIO()
    _figure(history.probabilities_NBK[moment], history.candidates, title).savefig(picture, dpi=80)
    return Image.open(picture).convert("L")  # greys: all frames share one palette, so nothing flickers


def _figure(probabilities_BK: npt.NDArray[np.float64], candidates: str, title: str) -> Figure:
    num_blocks, num_candidates = probabilities_BK.shape
    size = (max(CELL * num_blocks, 5.0) + MARGIN, CELL * num_candidates + MARGIN)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.imshow(probabilities_BK.T, cmap="Greys", vmin=0.0, vmax=1.0, aspect="auto")
    _write_winners(axes, probabilities_BK)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlabel("block", color=INK)
    axes.set_xticks(range(num_blocks), [str(block) for block in range(1, num_blocks + 1)])
    axes.set_yticks(range(num_candidates), [f"{BLOCKS[letter].name}  {letter}" for letter in candidates])
    axes.set_xticks(np.arange(num_blocks + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(num_candidates + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="#bbbbbb", linewidth=0.8)
    axes.tick_params(which="both", length=0, colors=INK)
    axes.spines[:].set_visible(False)
    return figure


def _write_winners(axes: Axes, probabilities_BK: npt.NDArray[np.float64]) -> None:
    """The probability of each block's most likely candidate, in its cell."""
    for block, winner in enumerate(probabilities_BK.argmax(axis=1)):
        probability = probabilities_BK[block, winner]
        colour = PALE if probability > 0.5 else INK
        axes.text(block, winner, f"{probability:.2f}", ha="center", va="center", color=colour, fontsize=10)
