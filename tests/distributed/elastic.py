"""Runs of two processes that are killed at planned moments, and that torchrun starts again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import tomli_w

from tests.training.runs import outcome, small_table, write_text

from .cases import torchrun

Kill = tuple[int, str, int]  # rank, moment of `victim`, number of the call


def write_recipe(folder: Path, *, steps: tuple[int, int] = (25, 18), **training: Any) -> Path:
    """The small run with dropout, for two processes."""
    table = small_table(write_text(folder))
    table["training"] |= {"batch_size": 8, "timeout_seconds": 60, **training}
    for stage, number in zip(table["stage"], steps, strict=True):
        stage["steps"] = number
    path = folder / "small.toml"
    path.write_text(tomli_w.dumps(table))
    return path


def command(recipe: Path, run: Path, *words: str) -> list[str]:
    return ["train", str(recipe), "--out", str(run), "--name", "small", "--or-resume", "--quiet", *words]


def victim(folder: Path, kills: list[Kill], recipe: Path, run: Path, **more: Any) -> list[str]:
    """The words after those of torchrun for a run with planned kills."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"kills": kills, **more}))
    return ["-m", "tests.distributed.victim", str(plan), *command(recipe, run)]


def assert_ends_as_undisturbed(folder: Path, recipe: Path, kills: list[Kill], timeout: float = 120) -> None:
    """Every kill happens, torchrun starts the processes again, and the end is the same, bit for bit."""
    whole, run = folder / "whole", folder / "killed" / "run"
    run.parent.mkdir()
    words = victim(folder, kills, recipe, run, whole=command(recipe, whole))
    done = torchrun(["--nproc-per-node", "2", "--max-restarts", str(len(kills)), *words], timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    happened = [tuple(json.loads(line)) for line in (folder / "plan.done").read_text().splitlines()]
    assert happened == kills
    assert outcome(run) == outcome(whole)
    for kept in (run.parent, run / "checkpoints"):  # no partial files and folders
        assert not [name for name in os.listdir(kept) if name.startswith(".")]
    assert set(os.listdir(run / "checkpoints")) == set(os.listdir(whole / "checkpoints"))
