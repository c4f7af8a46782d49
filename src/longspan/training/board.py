"""TensorBoard: curves, heat maps of spans and of a search, and samples.

Shapes: L layers, H heads, B blocks, K candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.tensorboard import SummaryWriter

_NO_CURVES = {"nats", "seconds"}  # running sums: they are no useful curves
_CELL = 16  # pixels of one value of a heat map
_LARGEST = 256  # rows and columns of a heat map
_MISSING = 128  # grey
# From low to high: dark blue, blue, green, yellow; also clear without colour, since lightness grows.
_COLOURS = np.array([[33, 18, 66], [45, 78, 142], [32, 144, 140], [110, 205, 90], [253, 231, 60]])


class Board:
    """The event files of a run folder."""

    def __init__(self, folder: Path, step: int) -> None:
        """Event files cannot be truncated: `step` hides what lies beyond the checkpoint."""
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, prefix: str, values: Mapping[str, Any], step: int) -> None:
        """Every float becomes a point of a curve."""
        for name, value in values.items():
            if isinstance(value, dict):
                self.write(f"{prefix}/{name}", value, step)
            elif isinstance(value, float) and name not in _NO_CURVES:
                self._writer.add_scalar(f"{prefix}/{name}", value, step)

    def write_record(self, name: str, step: int, fields: Mapping[str, Any]) -> None:
        """The spans and the probabilities of a search as images, samples as text; other records are left."""
        if name == "samples" and isinstance(fields.get("text"), str):
            # Indented, so that nothing in it is taken for Markdown.
            lines = fields["text"].split("\n")
            self._writer.add_text("samples", "\n".join(f"    {line}" for line in lines), step)
        elif name == "spans":
            spans_LH, limit = _table(fields.get("spans")), fields.get("limit")
            if spans_LH is not None and isinstance(limit, int | float) and limit > 1:
                part_LH = np.log2(np.maximum(spans_LH, 1.0)) / np.log2(limit)
                self._image("spans/layers_down_heads_across", part_LH, step)
        elif name == "architecture":
            probabilities_BK = _table(fields.get("probabilities"))
            if probabilities_BK is not None:
                self._image("search/candidates_down_blocks_across", probabilities_BK.T, step)

    def close(self) -> None:
        self._writer.close()

    def _image(self, tag: str, values: npt.NDArray[np.float64], step: int) -> None:
        self._writer.add_image(tag, heat_map(values), step, dataformats="HWC")


def heat_map(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """An image [height, width, 3] of values from 0 to 1, a square for each; nan is grey."""
    values = values[:_LARGEST, :_LARGEST]
    places = np.linspace(0.0, 1.0, len(_COLOURS))
    shown = np.stack([np.interp(values, places, channel) for channel in _COLOURS.T], axis=-1)
    shown[np.isnan(values)] = _MISSING
    return shown.round().astype(np.uint8).repeat(_CELL, 0).repeat(_CELL, 1)


def _table(rows: Any) -> npt.NDArray[np.float64] | None:
    """Rows of numbers, with nan where one is shorter than others; None if they are something else."""
    try:
        width = max(map(len, rows))
        return np.array([[*row, *[np.nan] * (width - len(row))] for row in rows], dtype=np.float64)
    except (TypeError, ValueError):
        return None
