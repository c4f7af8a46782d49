"""What is not the same in several runs: options and scores."""

from __future__ import annotations

from collections.abc import Sequence

from longspan.inspection.report.data import RunData

ABSENT = "–"


def comparison(runs: Sequence[RunData]) -> list[tuple[str, ...]]:
    """A row for each option that differs, then one for each score; a column for each run."""
    options = dict.fromkeys(name for run in runs for name in run["config"])
    rows = [(name, *(run["config"].get(name, ABSENT) for run in runs)) for name in options]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    measures = dict.fromkeys(
        (split, name) for run in runs for split, score in (run["score"] or {}).items() for name in score
    )
    scores = [
        (f"{split}: {name.replace('_', ' ')}", *(_score(run, split, name) for run in runs))
        for split, name in measures
    ]
    return differing + scores


def _score(run: RunData, split: str, name: str) -> str:
    value = (run["score"] or {}).get(split, {}).get(name)
    return ABSENT if value is None else f"{value:.4f}"
