"""What a report shows of a run, read from its folder as plain JSON values.

Nothing is executed or imported: a run folder may come from anywhere. A damaged line is skipped and counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from longspan.config.schema import parse_toml
from longspan.errors import UserError
from longspan.progress import task

RunData: TypeAlias = dict[str, Any]

CURVES = ("loss", "bits_per_byte", "learning_rate", "tokens_per_second")
MAX_POINTS = 2_000  # of one curve
MAX_MOMENTS = 120  # of the slider over training
MAX_CHARACTERS = 4_000  # of one sample
RAMP = 32  # the default of span.ramp
_MOST_BYTES = 1 << 20  # of one line
_LARGEST = 1e300  # beyond it a number is damaged; also false for infinities and NaN


def run_data(folder: Path) -> RunData:
    """Summary, curves, spans, search and samples of a run; what the folder does not have is empty."""
    if not folder.is_dir():
        raise UserError(f"there is no run folder {folder}{': it is a file' if folder.exists() else ''}")
    source = folder / "config.toml"
    if not source.is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.toml")
    config = parse_toml(source.read_bytes(), str(source))
    damaged: dict[str, int] = {}
    metrics = _Journal(folder, "metrics", damaged).read(_metric)
    train = [line for line in metrics if line.get("kind") == "train"]
    valid = [line for line in metrics if line.get("kind") == "valid"]
    final = metrics[-1] if metrics and metrics[-1].get("kind") == "final" else None
    spans = _Journal(folder, "spans", damaged).read(_spans)
    search = _Journal(folder, "architecture", damaged).read(_probabilities)
    samples = _Journal(folder, "samples", damaged).read(_sample)
    return {
        "folder": str(folder),
        "name": _text(config.get("name")) or folder.name,
        "config": flat(config),
        "environment": _environment(folder / "environment.json"),
        "finished": final is not None,
        "step": max((line["step"] for line in metrics), default=0),
        "steps": _planned_steps(config),
        "seconds": max((_number(line.get("seconds")) or 0.0 for line in train), default=0.0),
        "tokens": max((_number(line.get("tokens")) or 0 for line in train), default=0),
        "score": _score(final, valid),
        "curves": {
            "train": thinned([_point(line) for line in train], MAX_POINTS),
            "valid": thinned([_point(line) | _tokens_at(line, train) for line in valid], MAX_POINTS),
        },
        "spans": thinned(spans, MAX_MOMENTS),
        "ramp": _ramp(config),
        "search": thinned(search, MAX_MOMENTS),
        "samples": thinned(samples, MAX_MOMENTS),
        "damaged": damaged,
    }


def several(folders: Sequence[Path]) -> list[RunData]:
    """The same of several runs."""
    found = []
    with task("reading", "runs", len(folders)) as progress:
        for folder in folders:
            found.append(run_data(folder))
            progress(len(found))
    return found


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted names and values as text; the stages are numbered from 1."""
    found: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
            for number, entry in enumerate(value, 1):
                found |= flat(entry, f"{prefix}{name}.{number}.")
        else:
            found[f"{prefix}{name}"] = _text(value)
    return found


def thinned(entries: list[Any], most: int) -> list[Any]:
    """At most this many entries, evenly spaced, with the first and the last."""
    if len(entries) <= most:
        return entries
    return [entries[round(n * (len(entries) - 1) / (most - 1))] for n in range(most)]


class _Journal:
    """The lines of `<name>.jsonl`; how many are damaged is added to a dictionary."""

    def __init__(self, folder: Path, name: str, damaged: dict[str, int]) -> None:
        self._path, self._damaged = folder / f"{name}.jsonl", damaged

    def read(self, parse: Callable[[Any], RunData]) -> list[RunData]:
        """The entries, in order."""
        found: list[RunData] = []
        for line in self._lines():
            try:
                found.append(parse(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
                self._damaged[self._path.name] = self._damaged.get(self._path.name, 0) + 1
        return found

    def _lines(self) -> Iterator[bytes]:
        """The complete lines: the last one may still be being written."""
        if not self._path.is_file():  # a named pipe never ends
            return
        with self._path.open("rb") as file:
            while line := file.readline(_MOST_BYTES):
                if line.endswith(b"\n"):
                    yield line
                elif len(line) == _MOST_BYTES:
                    yield b""  # too long to be a record: damaged


def _metric(line: Any) -> RunData:
    if line["kind"] not in ("train", "valid", "final"):
        raise ValueError
    return {**line, "step": _whole(line["step"] or 0)}


def _point(line: RunData) -> RunData:
    numbers = {name: _number(line.get(name)) for name in ("seconds", "tokens", *CURVES)}
    return {"step": line["step"]} | {name: value for name, value in numbers.items() if value is not None}


def _tokens_at(line: RunData, train: list[RunData]) -> RunData:
    """The tokens read until an evaluation, which has only a step: those of the nearest line of training."""
    if not train:
        return {}
    nearest = min(train, key=lambda other: abs(other["step"] - line["step"]))
    tokens = _number(nearest.get("tokens"))
    if tokens is None or not nearest["step"]:
        return {}
    return {"tokens": tokens * line["step"] / nearest["step"]}


def _spans(line: Any) -> RunData:
    spans = [[_finite(span) for span in spans_H] for spans_H in line["spans"]]
    if not spans or not all(spans):
        raise ValueError
    limit = _whole(line["limit"])
    return {"step": _whole(line["step"]), "limit": limit, "spans": [[round(s, 2) for s in h] for h in spans]}


def _probabilities(line: Any) -> RunData:
    candidates = _text(line["candidates"])
    rows = [[round(_finite(p), 4) for p in row] for row in line["probabilities"]]
    if not rows or any(len(row) != len(candidates) for row in rows):
        raise ValueError
    temperature = _finite(line["temperature"])
    return {
        "step": _whole(line["step"]),
        "candidates": candidates,
        "temperature": temperature,
        "probabilities": rows,
    }


def _sample(line: Any) -> RunData:
    if not isinstance(line["text"], str):
        raise ValueError
    return {"step": _whole(line["step"]), "text": _text(line["text"][:MAX_CHARACTERS])}


def _score(final: RunData | None, valid: list[RunData]) -> RunData | None:
    """The scores at the end, or the best one on the valid split so far."""
    if final is not None:
        splits = {split: final[split] for split in ("valid", "test") if isinstance(final.get(split), dict)}
    else:
        best = [line for line in valid if line.get("best")]
        splits = {"valid": best[-1]} if best else {}
    names = ("bits_per_byte", "bits_per_token", "perplexity", "loss")
    return {
        split: {name: score[name] for name in names if _number(score.get(name)) is not None}
        for split, score in splits.items()
    } or None


def _environment(path: Path) -> dict[str, str]:
    try:
        facts = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        facts = {}
    return flat(facts) if isinstance(facts, dict) else {}


def _planned_steps(config: RunData) -> int | None:
    stages = config.get("stage")
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        return None
    steps = [stage.get("steps") for stage in stages]
    return sum(steps) if steps and all(isinstance(n, int) for n in steps) else None


def _ramp(config: RunData) -> int:
    model = config.get("model")
    span = model.get("span") if isinstance(model, dict) else None
    ramp = span.get("ramp") if isinstance(span, dict) else None
    return ramp if isinstance(ramp, int) and ramp > 0 else RAMP


def _text(value: Any) -> str:
    """As text that UTF-8 can hold."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode("utf-8", "replace").decode("utf-8")


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        raise ValueError
    return value


def _finite(value: Any) -> float:
    number = _number(value)
    if number is None:
        raise ValueError
    return number


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        return None
    return value
