"""Run folders for the pages: written, not trained, with curves, spans, a search and samples."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

LAYERS, HEADS, LIMIT = 3, 4, 512
STEPS = range(10, 401, 10)
CANDIDATES = "sfi"


def written_run(path: Path, name: str = "mine", width: int = 64, *, search: bool = True) -> Path:
    """A run of 400 steps, not finished."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(
        f"name = {json.dumps(name)}\n[model]\nwidth = {width}\n[model.span]\nramp = 16\n"
        "[[stage]]\nsteps = 500\n"
    )
    lines: list[dict[str, Any]] = []
    for step in STEPS:
        lines.append(train_line(step, width))
        if step % 100 == 0:
            lines.append(valid_line(step, width))
    _write(path / "metrics.jsonl", lines)
    _write(path / "spans.jsonl", [spans_line(step) for step in STEPS])
    if search:
        _write(path / "architecture.jsonl", [_search_line(step) for step in STEPS])
    _write(path / "samples.jsonl", [{"step": s, "text": f"text of step {s}"} for s in (100, 200, 300, 400)])
    _write(path / "environment.json", [{"torch": "2.11", "device": "cpu"}])
    return path


def train_line(step: int, width: int = 64) -> dict[str, Any]:
    loss = 1.2 + 4.4 * math.exp(-step / 90) + 3.2 / width + 0.05 * math.sin(step)
    return {
        "kind": "train",
        "step": step,
        "loss": loss,
        "bits_per_byte": loss / math.log(2),
        "learning_rate": 0.01 * min(1.0, step / 50),
        "tokens": 3072 * step,
        "seconds": step / 8,
        "tokens_per_second": 24_000 + 400 * math.sin(step / 7),
    }


def valid_line(step: int, width: int = 64) -> dict[str, Any]:
    line = train_line(step, width)
    loss = line["loss"] + 0.1
    return {
        "kind": "valid",
        "step": step,
        "seconds": line["seconds"],
        "loss": loss,
        "bits_per_byte": loss / math.log(2),
        "best": True,
    }


def spans_line(step: int) -> dict[str, Any]:
    def span(layer: int, head: int) -> float:
        return max(4.0, LIMIT * 0.5 ** (head + 2.5 * (1 - step / 400) + 0.5 * (LAYERS - 1 - layer)))

    spans = [[span(layer, head) for head in range(HEADS)] for layer in range(LAYERS)]
    return {"step": step, "limit": LIMIT, "spans": spans}


def _search_line(step: int) -> dict[str, Any]:
    done = step / STEPS[-1]
    rows = []
    for block in range(8):
        best = [(1 - done) / 3] * 3
        best[block % 3] += done
        rows.append(best)
    return {"step": step, "candidates": CANDIDATES, "temperature": 5 - 4 * done, "probabilities": rows}


def append(path: Path, *lines: dict[str, Any]) -> None:
    """Add lines to a journal, as a training does."""
    with path.open("a") as journal:
        for line in lines:
            journal.write(json.dumps(line) + "\n")


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
