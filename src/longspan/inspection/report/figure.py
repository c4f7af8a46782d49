"""The report as a figure for a paper: PNG or SVG of curves and spans, GIF of the spans over training."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, StrMethodFormatter
from PIL import Image

from longspan.errors import UserError
from longspan.files import whole_file
from longspan.inspection.report.data import CURVES, RunData, thinned
from longspan.progress import task

TITLES = {
    "loss": "loss (nats per token)",
    "bits_per_byte": "bits per byte",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second",
}
MAX_FRAMES = 60
FRAME_MILLISECONDS, LAST_MILLISECONDS = 150, 2_000


def draw_report(runs: Sequence[RunData], path: Path, kind: str) -> None:
    """Write the curves, and below them the latest spans of each run that has any, as PNG or SVG."""
    curves = [
        name for name in CURVES if any(_points(run, split, name) for run in runs for split in run["curves"])
    ]
    learned = [run for run in runs if run["spans"]]
    if not curves and not learned:
        raise UserError(f"{runs[0]['folder']} has nothing to draw yet: it has no metrics and no spans")
    rows = (len(curves) + 1) // 2 + (len(learned) + 1) // 2
    figure = Figure(figsize=(10, 3.2 * rows), layout="constrained")
    places = list(figure.subplots(rows, 2, squeeze=False).flat)
    below = places[2 * ((len(curves) + 1) // 2) :]
    for axes, name in zip(places, curves, strict=False):
        _draw_curve(axes, runs, name)
    for axes, run in zip(below, learned, strict=False):
        _draw_heads(figure, axes, run, -1)
    for axes in places:
        if not axes.has_data():
            axes.remove()
    with whole_file(path) as partial:
        figure.savefig(partial, format=kind, dpi=150)


def animate_report(run: RunData, path: Path) -> None:
    """Write the spans of a run over training as GIF."""
    if not run["spans"]:
        raise UserError(f"{run['folder']} has no spans to animate: choose another --format")
    moments = thinned(list(range(len(run["spans"]))), MAX_FRAMES)
    frames = []
    with task("drawing", "frames", len(moments)) as progress:
        for moment in moments:
            frames.append(_frame(run, moment))
            progress(len(frames))
    times = [FRAME_MILLISECONDS] * (len(frames) - 1) + [LAST_MILLISECONDS]
    with whole_file(path) as partial:
        frames[0].save(partial, format="GIF", save_all=True, append_images=frames[1:], duration=times, loop=0)


def _frame(run: RunData, moment: int) -> Image.Image:
    figure = Figure(figsize=(6, 4), layout="constrained")
    _draw_heads(figure, figure.subplots(), run, moment)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=80)
    return Image.open(picture).convert("P", palette=Image.Palette.ADAPTIVE)


def _points(run: RunData, split: str, name: str) -> list[tuple[int, float]]:
    return [(point["step"], point[name]) for point in run["curves"][split] if name in point]


def _draw_curve(axes: Axes, runs: Sequence[RunData], name: str) -> None:
    for number, run in enumerate(runs):
        for split, style in (("train", "-"), ("valid", "o--")):
            if points := _points(run, split, name):
                label = f"{_plain(run['name'])}, {split}"
                axes.plot(*zip(*points, strict=True), style, color=f"C{number}", markersize=4, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel(TITLES[name])
    axes.grid(color="#dddddd", linewidth=0.7)
    axes.legend(fontsize=8, frameon=False)


def _draw_heads(figure: Figure, axes: Axes, run: RunData, moment: int) -> None:
    """The span of every head, layers down and heads across; a head that a layer does not have is empty."""
    entry, history = run["spans"][moment], run["spans"]
    most = max(map(len, entry["spans"]))
    spans_LH = np.array([[*row, *[np.nan] * (most - len(row))] for row in entry["spans"]], dtype=float)
    longest = max(other["limit"] for other in history)
    shortest = min(span for other in history for row in other["spans"] for span in row)
    scale = LogNorm(max(1.0, min(shortest, longest / 2)), max(2.0, float(longest)))
    image = axes.imshow(np.maximum(spans_LH, 1.0), cmap="viridis", norm=scale, aspect="auto")
    axes.set_title(f"{_plain(run['name'])}: spans after step {entry['step']:,}", loc="left", fontsize=10)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    axes.set_xticks(range(most), [str(head + 1) for head in range(most)])
    axes.set_yticks(range(len(spans_LH)), [str(layer + 1) for layer in range(len(spans_LH))])
    bar = figure.colorbar(image, ax=axes, label="span in tokens", format=StrMethodFormatter("{x:,.0f}"))
    bar.set_ticks(FixedLocator([2**n for n in range(40)]))
    bar.minorticks_off()


def _plain(text: str) -> str:
    """Text in which matplotlib finds no formula."""
    return text.replace("$", r"\$")
