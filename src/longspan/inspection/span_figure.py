"""The picture of the learned spans: every head by layer, and the history of each layer."""

from __future__ import annotations

from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from longspan.files import whole_file
from longspan.inspection.spans import SpanHistory

INK = "#333333"


def draw_spans(history: SpanHistory, path: Path) -> None:
    """Write the picture as PNG."""
    num_layers = history.last_LH.shape[0]
    # viridis without its palest end, which is hard to see on white
    colours = [colormaps["viridis"](0.9 * layer / max(num_layers - 1, 1)) for layer in range(num_layers)]
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    now, course = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    _draw_heads(now, history, colours)
    _draw_course(course, history, colours)
    _scale_spans(now, history)
    for axes in (now, course):
        axes.grid(axis="y", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK)
    with whole_file(path) as partial:
        figure.savefig(partial, format="png", dpi=150)


def _draw_heads(axes: Axes, history: SpanHistory, colours: list[tuple[float, ...]]) -> None:
    """One bar per head, the longest first in each layer."""
    num_layers, num_heads = history.last_LH.shape
    width = 0.84 / num_heads
    bottom = _bottom(history)
    for layer in range(num_layers):
        spans_H = sorted(history.last_LH[layer], reverse=True)
        x_H = [layer + 1 - 0.42 + (h + 0.5) * width for h in range(num_heads)]
        axes.bar(x_H, [s - bottom for s in spans_H], 0.88 * width, bottom=bottom, color=colours[layer])
    axes.set_title(
        f"{history.name}: how far each head looks back {history.moment}",
        loc="left",
        fontsize=11,
        color=INK,
    )
    axes.set_xlabel("layer (a bar is a head, longest first)", color=INK)
    axes.set_ylabel("span in tokens, log scale", color=INK)
    axes.set_xlim(0.4, num_layers + 0.6)
    axes.xaxis.set_major_locator(FixedLocator([*range(1, num_layers + 1)]))


def _draw_course(axes: Axes, history: SpanHistory, colours: list[tuple[float, ...]]) -> None:
    """The mean span of each layer over training, and its longest head as a thin line."""
    marker = "o" if len(history.steps_N) == 1 else None  # a line needs two points
    for layer, colour in enumerate(colours):
        spans_NH = history.spans_NLH[:, layer]
        axes.plot(
            history.steps_N, spans_NH.max(axis=1), color=colour, linewidth=0.8, alpha=0.7, marker=marker
        )
        axes.plot(history.steps_N, spans_NH.mean(axis=1), color=colour, linewidth=2, marker=marker)
    axes.set_title("mean of each layer over training, thin: longest head", loc="left", fontsize=11, color=INK)
    axes.set_xlabel("step (colours: layers, as on the left)", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))


def _scale_spans(axes: Axes, history: SpanHistory) -> None:
    """Powers of two, from just under the shortest span to the limit."""
    axes.set_yscale("log", base=2)
    bottom, top = _bottom(history), history.limit
    powers = [2**k for k in range(32) if bottom < 2**k < top / 1.2]
    axes.yaxis.set_major_locator(FixedLocator([*powers, top]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda span, _: f"{span:,.0f}"))
    axes.set_ylim(bottom, top * 1.1)


def _bottom(history: SpanHistory) -> float:
    return max(0.5, float(history.spans_NLH.min()) / 1.5)
