"""The checkpoint that a stopped run continues from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from longspan import distributed
from longspan.errors import UserError
from longspan.files import whole_file, whole_folder
from longspan.runs import Checkpoint, RunFolder, checkpoint
from longspan.runs.kept import remove
from longspan.runs.shards import Place, full_tensor_on_cpu
from longspan.training.reporter import Reporter
from longspan.training.run_progress import RunProgress


def load(folder: RunFolder, reporter: Reporter, place: Place = full_tensor_on_cpu) -> Checkpoint | None:
    """The newest checkpoint that is not damaged; None if the run has never saved one.

    Every rank calls this. Rank 0 chooses and renames, then each reads what `place` asks for.
    """
    if distributed.size() == 1:
        return _choose(folder, reporter, lambda path: checkpoint.load(path, place))
    with distributed.first_before_others():
        found = distributed.is_first() and _choose(folder, reporter, checkpoint.check) is not None
    return checkpoint.load(folder.checkpoint("last"), place) if distributed.any_rank(found) else None


def _choose(folder: RunFolder, reporter: Reporter, read: Callable[[Path], Checkpoint]) -> Checkpoint | None:
    """Put the newest checkpoint that is not damaged in the place of `last`; returns what `read` does of it.

    `best` is the last choice. It holds everything that `last` would, except that with `training.average` its
    weights are the averaged ones. A run that dies before its first regular checkpoint may have nothing else.
    """
    last, best, damage = folder.checkpoint("last"), folder.checkpoint("best"), None
    if not os.path.lexists(best) and (before := checkpoint.previous(best)):
        os.replace(before[0], best)  # a writer was killed while it replaced `best`, see `kept`
    bests = (best, *checkpoint.previous(best))
    for source in (last, *checkpoint.previous(last), *bests):
        if not source.exists():
            continue
        try:
            saved = read(source)
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
                f"{_set_aside(folder)}: continuing from {source.name}{averaged if source in bests else ''}"
            )
            if source in bests:
                _copy(source, last)
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
    remove(damaged)
    os.replace(last, damaged)
    return f"{last} is damaged (now {damaged.name})"


def _copy(source: Path, target: Path) -> None:
    """Copy a checkpoint, a file or a folder of shards, to a name that is free."""
    if source.is_dir():
        with whole_folder(target) as partial:
            shutil.copytree(source, partial, dirs_exist_ok=True)
    else:
        with whole_file(target) as partial:
            shutil.copyfile(source, partial)
