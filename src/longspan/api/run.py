"""A trained run, as Python programs see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from longspan.config import RunConfig
from longspan.inspection.display import facts_html
from longspan.language_model import LoadedModel, load
from longspan.runs import RunFolder


class Run:
    """What `train` and `resume` return. It may be given wherever the path of a run folder may."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._folder.path

    @property
    def config(self) -> RunConfig:
        """Everything that decided what was trained."""
        return self._folder.config

    @property
    def final(self) -> dict[str, Any] | None:
        """The last line of metrics: under `valid` and `test` the scores of the best weights.

        None for a run that was stopped before its end.
        """
        return self._folder.final()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics, in order; `kind` is train, valid or final."""
        return [json.loads(line) for line in self._folder.metrics.read_bytes().splitlines()]

    def load(self, which: Literal["best", "last"] = "best", device: str = "auto") -> LoadedModel:
        """The trained model, ready to use."""
        return load(self.path, which, device)

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run('{self.path}')"

    def _repr_html_(self) -> str:
        final = self.final
        facts = [("run", str(self.path)), ("finished", "no" if final is None else "yes")]
        for split in ("valid", "test"):
            for name in ("bits_per_byte", "bits_per_token"):
                value = (final or {}).get(split, {}).get(name)
                if value is not None:
                    facts.append((f"{split}, {name.replace('_', ' ')}", f"{value:.4f}"))
        return facts_html(self.config.name, facts)
