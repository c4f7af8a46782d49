"""The checkpoint that a stopped run continues from."""

from __future__ import annotations

import os

from longspan.errors import UserError
from longspan.runs import Checkpoint, RunFolder, checkpoint
from longspan.training.reporter import Reporter
from longspan.training.run_progress import RunProgress


def load(folder: RunFolder, reporter: Reporter) -> Checkpoint | None:
    """The newest checkpoint that is not damaged; None if the run has never saved one.

    `best` is the last choice. It holds everything that `last` would, except that with `training.average` its
    weights are the averaged ones. A run that dies before its first regular checkpoint may have nothing else.
    """
    last, best, damage = folder.checkpoint("last"), folder.checkpoint("best"), None
    for source in (last, *checkpoint.previous(last), best):
        if not source.exists():
            continue
        try:
            saved = checkpoint.load(source)
        except checkpoint.Damaged as problem:
            damage = damage or problem
            continue
        if "progress" not in saved.facts:
            raise UserError(f"{source} holds only weights, no state of a training to resume: start a new run")
        try:
            RunProgress.from_json(saved.facts["progress"])
        except (KeyError, TypeError, AttributeError):
            raise UserError(
                f"{source} cannot be resumed: its progress is incomplete; start a new run"
            ) from None
        if source != last:
            averaged = ", with the averaged weights as weights" if saved.below("average") else ""
            reporter.say(
                f"{_set_aside(folder)}: continuing from {source.name}{averaged if source == best else ''}"
            )
            if source == best:
                checkpoint.save(last, saved.tensors, saved.facts)
            else:
                os.replace(source, last)
        return saved
    if damage is not None:
        raise damage
    if folder.has_saved:
        raise UserError(
            f"{folder.path} has no checkpoint left to continue from: put its folder 'checkpoints' back, "
            "or start a new run in another folder"
        )
    return None


def _set_aside(folder: RunFolder) -> str:
    """Rename `last` if it is there, since it is damaged; returns what is wrong with it."""
    last = folder.checkpoint("last")
    if not last.exists():
        return f"there is no {last}"
    damaged = last.with_suffix(".damaged")
    os.replace(last, damaged)
    return f"{last} is damaged (now {damaged.name})"
