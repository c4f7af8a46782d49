"""From a search to the recipe of what it found."""

from __future__ import annotations

from dataclasses import replace

from longspan.config import RunConfig


def found_recipe(config: RunConfig, pattern: str) -> RunConfig:
    """The same text, model and training with fixed blocks, to be trained from scratch."""
    model = config.model  # of an architecture that has patterns: no other can be searched
    return replace(
        config,
        name=f"{config.name}-found",
        description=f"{pattern}, found by {config.name}",
        model=replace(model, pattern=pattern),
        search=None,
        expected={},
    )
