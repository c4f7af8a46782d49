"""Detects that a run has diverged, and names the last good checkpoint."""

from __future__ import annotations

import math
from typing import Literal

from longspan import distributed
from longspan.errors import UserError
from longspan.evaluation import Score
from longspan.models import LanguageModel
from longspan.optim.norms import norms
from longspan.runs import RunFolder, checkpoint
from longspan.training.errors import Diverged
from longspan.training.loss_meter import BadLoss, LossMeter
from longspan.training.run_progress import RunProgress


class DivergenceCheck:
    """Raises `Diverged` when a loss, a weight or a score is not finite."""

    def __init__(self, folder: RunFolder, model: LanguageModel) -> None:
        self._folder, self._model = folder, model

    def check_losses(self, meter: LossMeter) -> None:
        """Synchronises with the device, to read all losses."""
        bad = meter.read()
        if bad is not None:
            raise self._diverged(f"the loss is {bad.loss}", bad)

    def check_weights(self, progress: RunProgress) -> None:
        own = [distributed.local(parameter.detach()) for parameter in self._model.parameters()]
        if distributed.any_rank(not bool(norms(own).isfinite().all())):
            raise self._diverged("the weights are no longer finite", progress)

    def check_score(self, score: Score, split: str, progress: RunProgress) -> None:
        if not math.isfinite(score.nats):
            raise self._diverged(f"the {split} loss is {score.nats}", progress)

    def _diverged(self, what: str, at: RunProgress | BadLoss) -> Diverged:
        return Diverged(
            f"{what} at step {at.step} with learning rate {at.learning_rate:.3g}: try a lower one; "
            f"{self._last_good_checkpoint()}"
        )

    def _last_good_checkpoint(self) -> str:
        steps = {}
        which: Literal["last", "best"]
        for which in ("last", "best"):
            path = self._folder.checkpoint(which)
            try:
                steps[path] = checkpoint.load(path).facts["progress"]["step"]
            except UserError:  # missing or damaged
                continue
        if not steps:
            return "there is no checkpoint yet"
        newest = max(steps, key=steps.__getitem__)
        return f"the last good checkpoint is {newest} of step {steps[newest]}"
