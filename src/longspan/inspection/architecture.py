"""The history of a search, read from its run folder. Shapes: N log steps, B blocks, K candidates."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longspan.errors import UserError
from longspan.runs import RunFolder


@dataclass(frozen=True)
class ArchitectureHistory:
    """The probability of every candidate in every block, over the search."""

    name: str
    candidates: str
    steps_N: npt.NDArray[np.int64]
    temperatures_N: npt.NDArray[np.float64]
    probabilities_NBK: npt.NDArray[np.float64]


def read_architecture(run: RunFolder) -> ArchitectureHistory:
    """The history that a search wrote; an incomplete line of a killed run is skipped."""
    path = run.architecture
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    moments = [_moment(run, number, line) for number, line in enumerate(lines, 1) if line.endswith("\n")]
    if not moments:
        raise UserError(f"{run.path} has no architectures to show: 'longspan search' writes them")
    candidates, steps, temperatures, probabilities = zip(*moments, strict=True)
    return ArchitectureHistory(
        run.config.name,
        candidates[-1],
        np.array(steps),
        np.array(temperatures, dtype=np.float64),
        np.array(probabilities, dtype=np.float64),
    )


def _moment(run: RunFolder, number: int, line: str) -> tuple[str, int, float, list[list[float]]]:
    try:
        moment = json.loads(line)
        return moment["candidates"], moment["step"], moment["temperature"], moment["probabilities"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"line {number} of {run.architecture} is damaged: delete that line") from None
