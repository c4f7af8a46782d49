"""`longspan runs`: the runs below a folder, with their progress and score."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from longspan.cli.console import add_quiet_option, show_table
from longspan.cli.paths import expanded
from longspan.config.schema import parse_toml
from longspan.errors import UsageError, UserError
from longspan.progress import task

MEASURES = {"bits_per_byte": "bits/byte", "bits_per_token": "bits/token"}  # the first that a score has


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "runs",
        help="list runs with their step and score",
        description="List the run folders below a folder: name, architecture, corpus, step, and the score on "
        "the test split, or the best one on the valid split if the run is not finished.",
    )
    parser.add_argument(
        "folder", nargs="?", default="runs", type=expanded, metavar="FOLDER", help="default: runs"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")
    add_quiet_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    if not args.folder:
        raise UsageError("FOLDER is empty (see 'longspan runs --help')")
    top = Path(args.folder)
    if not top.is_dir():
        raise UserError(f"there is no folder {top}: give the folder that your runs are in")
    found = []
    with task("reading", "runs") as progress:
        for folder in run_folders(top):
            found.append(_facts(folder))
            progress(len(found))
    if args.json:
        for facts in found:
            print(json.dumps(facts))
        return
    if not found:
        raise UserError(f"{top} has no runs: give the folder that your runs are in")
    rows = [
        (
            facts["run"],
            facts["name"] or "",
            facts["architecture"] or "",
            facts["corpus"] or "",
            _steps(facts),
            _score(facts),
        )
        for facts in found
    ]
    show_table(("run", "name", "architecture", "corpus", "step", "score"), rows)


def run_folders(top: Path) -> Iterator[Path]:
    """Folders with a config.toml and checkpoints, in order; links and folders inside runs are not entered."""
    for place, folders, files in os.walk(top):
        if "config.toml" in files and "checkpoints" in folders and Path(place, "config.toml").is_file():
            folders.clear()
            yield Path(place)
        folders.sort()


def _facts(folder: Path) -> dict[str, Any]:
    """Read without building anything: a damaged run is listed too."""
    try:
        source = folder / "config.toml"
        config = parse_toml(source.read_bytes(), str(source))
    except (OSError, UserError):
        config = {}
    lines = list(_metrics(folder / "metrics.jsonl"))
    last = lines[-1] if lines else {}
    finished = last.get("kind") == "final"
    valid = [line for line in lines if line.get("kind") == "valid" and line.get("best")]
    score: tuple[str, dict[str, Any]] | None = None
    if finished:
        score = next(((split, last[split]) for split in ("test", "valid") if _table(last.get(split))), None)
    elif valid:
        score = "valid", valid[-1]
    measure = next((name for name in MEASURES if score and isinstance(score[1].get(name), float)), None)
    stages = config.get("stage", [])
    lengths = [stage.get("steps") for stage in stages if _table(stage)] if isinstance(stages, list) else []
    return {
        "run": str(folder),
        "name": config.get("name"),
        "architecture": _inside(config, "model", "architecture"),
        "corpus": _inside(config, "data", "corpus"),
        "step": max((line["step"] for line in lines if isinstance(line.get("step"), int)), default=0),
        "steps": sum(steps for steps in lengths if isinstance(steps, int)) or None,
        "finished": finished,
        "split": score[0] if score and measure else None,
        "measure": measure,
        "score": score[1][measure] if score and measure else None,
    }


def _metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines: the last one may be cut in a run that was killed."""
    try:
        lines = path.read_bytes().splitlines() if path.is_file() else []  # a pipe would wait for a writer
    except OSError:
        return
    for line in lines:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if _table(found):
            yield found


def _inside(config: dict[str, Any], table: str, key: str) -> str | None:
    inner = config.get(table)
    return str(inner[key]) if _table(inner) and key in inner else None


def _table(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _steps(facts: dict[str, Any]) -> str:
    if facts["finished"]:
        return f"{facts['step']:,}, finished"
    return f"{facts['step']:,} of {facts['steps']:,}" if facts["steps"] else f"{facts['step']:,}"


def _score(facts: dict[str, Any]) -> str:
    if facts["score"] is None:
        return ""
    return f"{facts['score']:.4f} {MEASURES[facts['measure']]} ({facts['split']})"
