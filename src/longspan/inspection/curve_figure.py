"""The picture of a context curve: bits over the number of tokens that the model may see."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from longspan.files import whole_file

INK = "#333333"
COLOUR = "#31688e"
LEAST_BITS = 0.1  # height of the picture
CHARACTER = 0.0135  # its width at the axis, of that of the axis


def draw_context_curve(
    contexts: Sequence[int], bits: Sequence[float], path: Path, *, title: str, unit: str = "bits per byte"
) -> None:
    """Write the picture as PNG or SVG, by the ending of `path`.

    `bits` has one value more than `contexts`: the last one is that of all of the past.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    end = 4 * max(contexts, default=1)  # "all" has no length: it stands at the right, after a gap
    axes.plot(contexts, bits[:-1], color=COLOUR, linewidth=2, marker="o")
    axes.plot([*contexts[-1:], end], bits[-2:], color=COLOUR, linewidth=1.2, linestyle=":", marker="o")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator([*contexts, end]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([*contexts, end], [*_labels(contexts, end), "all"])
    low, high = axes.get_ylim()  # a curve that is flat must look so
    if high - low < LEAST_BITS:
        middle = (low + high) / 2
        axes.set_ylim(middle - LEAST_BITS / 2, middle + LEAST_BITS / 2)
    axes.set_title(title, loc="left", fontsize=11, color=INK, wrap=True)
    axes.set_xlabel("tokens of the past that the model may see, log scale", color=INK)
    axes.set_ylabel(unit, color=INK)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    with whole_file(path) as partial:
        figure.savefig(partial, format=path.suffix.removeprefix("."), dpi=150)


def _labels(contexts: Sequence[int], end: int) -> Iterator[str]:
    """Numbers, or nothing where one would overlap the label before it."""
    octaves, edge = math.log2(end / min(contexts, default=1)), -math.inf
    for context in contexts:
        label, place = f"{context:,}", math.log2(context) / octaves
        half = CHARACTER * (len(label) + 1) / 2
        if place - half < edge:
            yield ""
        else:
            edge = place + half
            yield label
