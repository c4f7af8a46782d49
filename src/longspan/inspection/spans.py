"""The learned spans of a run, read from its folder, and as text. Shapes: N log steps, L layers, H heads."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longspan.errors import UserError
from longspan.runs import RunFolder

BARS = "▁▂▃▄▅▆▇█"
HEADS_PER_LINE = 8


@dataclass(frozen=True)
class SpanHistory:
    """The span of every head, in tokens, over training."""

    name: str
    limit: int
    steps_N: npt.NDArray[np.int64]
    spans_NLH: npt.NDArray[np.float64]
    dynamic: bool = False  # spans depend on the input: these are means over a block in training

    @property
    def last_LH(self) -> npt.NDArray[np.float64]:
        """The latest spans."""
        last_LH: npt.NDArray[np.float64] = self.spans_NLH[-1]
        return last_LH

    @property
    def moment(self) -> str:
        """The step of the latest spans, as text."""
        return f"after step {self.steps_N[-1]:,}" if self.steps_N[-1] else "as it was imported"


def read_spans(run: RunFolder) -> SpanHistory:
    """The history that training wrote; an incomplete line of a killed run is skipped."""
    lines = run.spans.read_text(encoding="utf-8").splitlines(keepends=True) if run.spans.is_file() else []
    moments = [_moment(run, number, line) for number, line in enumerate(lines, 1) if line.endswith("\n")]
    if not moments:
        raise UserError(f"{run.path} has no spans to show: training writes them if the model learns spans")
    steps, limits, spans, dynamic = zip(*moments, strict=True)
    if len({len(spans_H) for spans_LH in spans for spans_H in spans_LH}) > 1:
        raise UserError(f"{run.path} has layers with different numbers of heads: read {run.spans} instead")
    spans_NLH = np.array(spans, dtype=np.float64)
    return SpanHistory(run.config.name, limits[-1], np.array(steps), spans_NLH, dynamic[-1])


def _moment(run: RunFolder, number: int, line: str) -> tuple[int, int, list[list[float]], bool]:
    try:
        moment = json.loads(line)
        return int(moment["step"]), int(moment["limit"]), moment["spans"], bool(moment.get("dynamic"))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"line {number} of {run.spans} is damaged: delete that line") from None


def spans_as_text(history: SpanHistory) -> str:
    """The latest spans for a terminal: layers down, heads across, each with a bar on a log scale."""
    shortest = float(history.last_LH.min())
    num_heads = history.last_LH.shape[1]
    cell = max(len(str(history.limit)) + 2, len("head 1"))
    columns = min(num_heads, HEADS_PER_LINE)
    lines = [
        f"{'Mean dynamic' if history.dynamic else 'Learned'} spans of {history.name} {history.moment}, "
        f"in tokens (limit {history.limit:,})",
        "",
        "layer    mean   " + "  ".join(f"head {h}".rjust(cell) for h in range(1, columns + 1)),
    ]
    for layer, spans_H in enumerate(history.last_LH, 1):
        cells = [f"{_bar(span, shortest, history.limit)} {span:>{cell - 2}.0f}" for span in spans_H]
        for start in range(0, num_heads, HEADS_PER_LINE):
            label = f"{layer:>5}  {spans_H.mean():>6.0f}   " if start == 0 else " " * 16
            lines.append(label + "  ".join(cells[start : start + HEADS_PER_LINE]))
    return "\n".join(lines)


def _bar(span: float, shortest: float, longest: float) -> str:
    if longest <= shortest:
        return BARS[0]
    height = math.log(max(span, shortest) / shortest) / math.log(longest / shortest)
    return BARS[min(int(height * len(BARS)), len(BARS) - 1)]
