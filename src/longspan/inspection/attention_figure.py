"""The picture of the mean attention weight over distance: a plot per head, heads across, layers down.

Shapes: W distances, N points of a curve.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from longspan.files import whole_file
from longspan.inspection.attention_by_distance import MeanAttention

INK = "#333333"
CURVE, AREA = "#31688e", "#d6e2ec"
MAX_POINTS = 400  # of a curve: more cannot be seen
DECADES = 6  # of weights, on the logarithmic scale
LEFT, RIGHT, TOP, BOTTOM = 1.0, 0.2, 0.95, 0.6  # margins in inches

Scale = Literal["linear", "log"]


def draw_attention(mean: MeanAttention, title: str, path: Path, scale: Scale = "linear") -> None:
    """Write the picture as PNG, or as SVG if the name ends so."""
    figure = attention_figure(mean, title, scale)
    with whole_file(path) as partial:
        figure.savefig(partial, format="svg" if path.suffix == ".svg" else "png", dpi=150)


def attention_figure(mean: MeanAttention, title: str, scale: Scale = "linear") -> Figure:
    """All heads have the same axis of distances.

    With "linear" the weight of each head has its own axis from 0 to the peak, which is written there: peaks
    of different heads differ by orders of magnitude. With "log" both axes are logarithmic and all heads have
    the same.
    """
    num_layers, num_heads, num_distances = mean.weights_LHW.shape
    width = min(max(10.5 / num_heads, 1.05), 5.0) * num_heads + LEFT + RIGHT
    height = min(max(8.0 / num_layers, 0.72), 2.2) * num_layers + TOP + BOTTOM
    figure = Figure(figsize=(width, height))
    grid = figure.subplots(num_layers, num_heads, sharex=True, sharey=scale == "log", squeeze=False)
    figure.subplots_adjust(
        LEFT / width, BOTTOM / height, 1 - RIGHT / width, 1 - TOP / height, wspace=0.1, hspace=0.14
    )
    edges_N = bin_edges(num_distances, scale)
    for axes in grid.flat:
        axes.set_axis_off()
    for layer, head in mean.heads():
        axes = grid[layer, head]
        axes.set_axis_on()
        weights_W = mean.weights_LHW[layer, head].numpy()
        _draw_head(axes, weights_W, edges_N, scale)
        if mean.persistent_LH is not None:
            y = 0.74 if scale == "linear" else 0.2  # where curves rarely are
            _note(axes, y, f"persistent {mean.persistent_LH[layer, head]:.0%}", left=scale == "log")
    _scale(grid, mean, scale)
    _label(figure, grid, mean, title, scale)
    return figure


def bin_edges(num_distances: int, scale: Scale) -> npt.NDArray[np.int64]:
    """The first distance of every point of a curve, and the end: at most `MAX_POINTS` points."""
    if num_distances <= MAX_POINTS:
        return np.arange(num_distances + 1)
    if scale == "linear":
        return np.linspace(0, num_distances, MAX_POINTS + 1).round().astype(np.int64)
    return np.unique(np.geomspace(1, num_distances + 1, MAX_POINTS + 1).round().astype(np.int64)) - 1


def _draw_head(
    axes: Axes, weights_W: npt.NDArray[np.float64], edges_N: npt.NDArray[np.int64], scale: Scale
) -> None:
    """The mean over the distances of every point."""
    values_N = np.add.reduceat(weights_W, edges_N[:-1]) / np.diff(edges_N)
    centres_N = (edges_N[:-1] + edges_N[1:] - 1) / 2
    if scale == "log":
        values_N = np.where(values_N > 0, values_N, np.nan)
    else:
        axes.fill_between(centres_N, values_N, color=AREA, linewidth=0)
        peak = float(values_N.max())
        axes.set_ylim(0, 1.12 * peak or 1.0)
        _note(axes, 0.93, f"{peak:.2g}")
    axes.plot(centres_N, values_N, color=CURVE, linewidth=0.9, marker="." if len(values_N) == 1 else None)


def _note(axes: Axes, y: float, text: str, *, left: bool = False) -> None:
    x, side = (0.06, "left") if left else (0.96, "right")
    axes.text(x, y, text, transform=axes.transAxes, ha=side, va="top", fontsize=6.5, color=INK)


def _scale(grid: npt.NDArray[np.object_], mean: MeanAttention, scale: Scale) -> None:
    """The axes of all heads."""
    furthest, num_heads = max(mean.weights_LHW.shape[2] - 1, 1), mean.weights_LHW.shape[1]
    for axes in grid.flat:
        axes.tick_params(labelsize=6.5, length=2, width=0.6, pad=1.5, colors=INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set(color="#999999", linewidth=0.6)
        if scale == "log":
            axes.grid(color="#e6e6e6", linewidth=0.5)
    first = grid[0, 0]  # what is shared is set once
    if scale == "log":
        first.set_xscale("symlog", linthresh=1, linscale=0.4)  # distance 0 has a place too
        first.set_yscale("log")
    sees_itself = bool((mean.weights_LHW[:, :, 0] > 0).any())
    nearest = 0 if sees_itself or scale == "linear" else 1
    first.set_xlim(nearest, max(furthest, nearest + 1))
    if scale == "linear":
        for axes in grid.flat:
            axes.yaxis.set_major_locator(NullLocator())
        first.xaxis.set_major_locator(MaxNLocator(3 if num_heads > 4 else 6, integer=True))
    else:
        first.xaxis.set_major_locator(FixedLocator([0, *(10**n for n in range(9) if 10**n <= furthest)]))
        positive = mean.weights_LHW[mean.weights_LHW > 0]
        top = float(positive.max()) if len(positive) else 1.0
        low = max(float(positive.min()), top / 10**DECADES) if len(positive) else 0.1
        first.set_ylim(low / 1.5, 1.5 * top)
        first.yaxis.set_major_locator(LogLocator(numticks=4))
        first.yaxis.set_minor_locator(NullLocator())
        first.xaxis.set_minor_locator(NullLocator())
    first.xaxis.set_major_formatter(FuncFormatter(lambda distance, _: _short(distance)))


def _short(distance: float) -> str:
    return f"{distance / 1000:g}k" if distance >= 1000 else f"{distance:g}"


def _label(
    figure: Figure, grid: npt.NDArray[np.object_], mean: MeanAttention, title: str, scale: Scale
) -> None:
    """Title, heads above the columns, layers beside the rows."""
    width, height = figure.get_size_inches()
    left = 0.15 / width
    figure.text(left, 1 - 0.12 / height, title, va="top", fontsize=11, color=INK)
    heights = "each curve from 0 to the peak written there" if scale == "linear" else "logarithmic scales"
    about = f"mean attention weight over distance, {mean.tokens:,} tokens; {heights}"
    if scale == "linear" and mean.weights_LHW.shape[2] > MAX_POINTS:
        about += f"; a point is the mean of {mean.weights_LHW.shape[2] / MAX_POINTS:.1f} distances"
    figure.text(left, 1 - 0.38 / height, about, va="top", fontsize=8, color=INK)
    figure.text(0.5, 0.12 / height, "distance in tokens", ha="center", fontsize=9, color=INK)
    for head, axes in enumerate(grid[0], 1):
        box = axes.get_position()
        x, y = (box.x0 + box.x1) / 2, box.y1 + 0.06 / height
        figure.text(x, y, f"head {head}", ha="center", va="bottom", fontsize=8, color=INK)
    for layer, axes in enumerate(grid[:, 0], 1):
        box = axes.get_position()
        figure.text(left, (box.y0 + box.y1) / 2, f"layer {layer}", va="center", fontsize=8, color=INK)
