"""The counters of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from longspan.config import StageConfig
from longspan.data import LanePosition
from longspan.optim import done

END = 2**62  # as an offset: beyond the end of any text, so that the next block begins an epoch


@dataclass
class RunProgress:
    """All counters that the next step depends on; stored as JSON in a checkpoint."""

    step: int = 0  # updates so far, over all stages
    tokens: int = 0
    learning_rate: float = 0.0  # of the latest update
    seconds: float = 0.0  # of training, without evaluation and checkpoints
    stage: int = 0
    stage_step: int = 0
    stage_seconds: float = 0.0
    stage_epoch: int | None = None  # the epoch in which the stage began; None before its first step
    stage_epochs: int = 0  # times the stage has reached the end of the text
    position: LanePosition = field(default_factory=LanePosition)
    evaluated: int = 0  # the step of the latest evaluation
    best_loss: float | None = None
    best_step: int | None = None
    since_best: int = 0  # evaluations after the best one

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(facts: dict[str, Any]) -> RunProgress:
        return RunProgress(**{**facts, "position": LanePosition(**facts["position"])})

    def stage_is_over(self, stage: StageConfig) -> bool:
        return done(stage, self.stage_step, self.stage_seconds, self.stage_epochs) == 1.0

    def out_of_patience(self, patience: int) -> bool:
        """Whether the last `patience` evaluations were no better than one before; never if it is 0."""
        return 0 < patience <= self.since_best

    def begin_next_stage(self, stage: StageConfig) -> None:
        self.stage, self.stage_step, self.stage_seconds = self.stage + 1, 0, 0.0
        self.stage_epoch, self.stage_epochs = None, 0
        if stage.epochs is not None:  # it reads whole epochs
            self.position = replace(self.position, offset=END)

    def count_epochs(self, epoch: int) -> bool:
        """Take the epoch of the next block into account; true if the stage has reached the end of the text.

        The last block of an epoch is known only when the next one is read.
        """
        if self.stage_epoch is None:
            self.stage_epoch = epoch
        before, self.stage_epochs = self.stage_epochs, epoch - self.stage_epoch
        return self.stage_epochs > before

    def count_step(self, tokens: int, position: LanePosition) -> None:
        self.step += 1
        self.stage_step += 1
        self.tokens += tokens
        self.position = position

    def count_time(self, seconds: float) -> None:
        self.seconds += seconds
        self.stage_seconds += seconds

    def count_score(self, loss: float) -> bool:
        """Take the score of an evaluation into account; whether it is the best so far."""
        self.evaluated = self.step
        best = self.best_loss is None or loss < self.best_loss
        if best:
            self.best_loss, self.best_step, self.since_best = loss, self.step, 0
        else:
            self.since_best += 1
        return best

    def forget_best(self) -> None:
        """The best weights were lost: the next evaluation is the best so far."""
        self.best_loss, self.evaluated, self.since_best = None, 0, 0

    def done(self, stages: Sequence[StageConfig]) -> float:
        """The fraction of the training that is done.

        Stages count by their time if all of them have a limit, else by their steps, as in `seconds_left`.
        """
        timed = all(stage.max_seconds is not None for stage in stages)
        lengths = [(stage.max_seconds if timed else stage.steps) or 0 for stage in stages]
        of_stage = done(stages[self.stage], self.stage_step, self.stage_seconds)
        return (sum(lengths[: self.stage]) + lengths[self.stage] * of_stage) / sum(lengths)

    def seconds_left(self, stages: Sequence[StageConfig]) -> float:
        """Estimated training time of this stage and all later ones, at the speed so far.

        All `stages` have a length in steps, an estimate if it is configured in epochs.
        """
        per_step = self.seconds / self.step
        steps = [stage.steps or 0 for stage in stages[self.stage :]]
        steps[0] -= self.stage_step
        limits = [stage.max_seconds or math.inf for stage in stages[self.stage :]]
        limits[0] -= self.stage_seconds
        return sum(max(0.0, min(n * per_step, limit)) for n, limit in zip(steps, limits, strict=True))
