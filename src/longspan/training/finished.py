"""Whether a run is finished."""

from __future__ import annotations

from longspan.config import RunConfig
from longspan.errors import UserError
from longspan.runs import RunFolder, checkpoint
from longspan.training.run_progress import RunProgress


def is_finished(folder: RunFolder) -> bool:
    """Whether a run has its final score; false again if steps or stages were added to config.toml since."""
    return advice(folder, None) is not None


def advice(folder: RunFolder, before: RunConfig | None) -> str | None:
    """What to do with a run that is finished; None if it is not. `before` is as in `_continue_run`."""
    if folder.final() is None:
        return None
    training = folder.config.training
    if training.at_end == "stop":
        return "nothing to do"
    last = folder.checkpoint("last")
    try:
        progress = RunProgress.from_json(checkpoint.load(last).facts["progress"]) if last.exists() else None
    except (UserError, KeyError, TypeError):
        progress = None
    if progress is None:  # the checkpoint is lost or incomplete; the final score exists
        longer = before is not None and before.stage != folder.config.stage
        return None if longer else "nothing to do"
    if progress.out_of_patience(training.patience):
        return (
            f"it had no better score in {progress.since_best} evaluations; to go on, raise training.patience"
        )
    left = folder.config.stage[progress.stage :]
    return "nothing to do" if len(left) < 2 and all(map(progress.stage_is_over, left)) else None
