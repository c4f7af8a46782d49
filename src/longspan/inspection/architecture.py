"""What a search wanted as it went on, read from its run folder. Shapes: N moments, B blocks, K candidates."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longspan.errors import UserError
from longspan.runs import RunFolder


@dataclass(frozen=True)
class ArchitectureHistory:
    """How likely every candidate was in every block, as the search went on."""

    name: str
    candidates: str
    steps_N: npt.NDArray[np.int64]
    temperatures_N: npt.NDArray[np.float64]
    probabilities_NBK: npt.NDArray[np.float64]


def read_architecture(run: RunFolder) -> ArchitectureHistory:
    """The history that a search wrote; a line that a killed run left unfinished is passed over."""
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
