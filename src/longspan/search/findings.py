"""The result of a search, from its run folder: patterns, pictures and a recipe.

Shapes: B blocks, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from longspan.files import whole_file
from longspan.inspection import animate_architecture, draw_architecture, read_architecture
from longspan.language_model import load
from longspan.models import Supernet
from longspan.runs import RunFolder
from longspan.search.recipe import found_recipe


@dataclass(frozen=True)
class Findings:
    """The distribution over patterns in the best weights of a search."""

    pattern: str
    candidates: str
    probabilities_BK: npt.NDArray[np.float64]
    top: list[tuple[str, float]]


def read_findings(folder: RunFolder, top: int = 1) -> Findings:
    """The result in the best weights, with the `top` most likely patterns and their probabilities."""
    model = load(folder.path, device="cpu").model
    assert isinstance(model, Supernet)
    probabilities_BK = model.probabilities_BK().detach().double().numpy()
    return Findings(model.pattern(), model.letters, probabilities_BK, model.top_patterns(top))


def write_findings(folder: RunFolder, findings: Findings, step: int) -> list[Path]:
    """Write picture, animation and recipe to the folder, unless they exist, and return their paths.

    `step` is that of the best weights.
    """
    picture, animation, recipe = (
        folder.path / name for name in ("architecture.png", "architecture.gif", "found.toml")
    )
    if not picture.exists():
        title = f"{folder.config.name}: {findings.pattern} after step {step:,}"
        draw_architecture(findings.probabilities_BK, findings.candidates, title, picture)
    if not animation.exists():
        animate_architecture(read_architecture(folder), animation)
    if not recipe.exists():
        with whole_file(recipe) as partial:
            partial.write_text(found_recipe(folder.config, findings.pattern).to_toml(), encoding="utf-8")
    return [picture, animation, recipe]
