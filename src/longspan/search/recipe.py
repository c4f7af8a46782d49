"""From a search to the recipe of its result."""

from __future__ import annotations

from dataclasses import replace

from longspan.config import RunConfig


def found_recipe(config: RunConfig, pattern: str) -> RunConfig:
    """The same data, model and training with a fixed pattern, to train from scratch."""
    model = config.model  # its architecture has patterns, otherwise it cannot be searched
    return replace(
        config,
        name=f"{config.name}-found",
        description=f"{pattern}, found by {config.name}",
        model=replace(model, pattern=pattern),
        search=None,
        expected={},
    )
