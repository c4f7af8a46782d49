"""How far a run has come."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from longspan.config import StageConfig
from longspan.data import LanePosition


@dataclass
class Progress:
    """Everything countable that the next step depends on; a checkpoint keeps it as JSON."""

    step: int = 0  # updates so far, all stages together
    tokens: int = 0
    learning_rate: float = 0.0  # of the latest update
    seconds: float = 0.0  # spent training: evaluation and checkpoints do not count
    stage: int = 0
    stage_step: int = 0
    stage_seconds: float = 0.0
    position: LanePosition = field(default_factory=LanePosition)
    evaluated: int = 0  # the step of the latest evaluation
    best_loss: float | None = None
    best_step: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(facts: dict[str, Any]) -> Progress:
        return Progress(**{**facts, "position": LanePosition(**facts["position"])})

    def stage_is_over(self, stage: StageConfig) -> bool:
        out_of_time = stage.max_seconds is not None and self.stage_seconds >= stage.max_seconds
        return self.stage_step >= stage.steps or out_of_time

    def begin_next_stage(self) -> None:
        self.stage, self.stage_step, self.stage_seconds = self.stage + 1, 0, 0.0

    def count_step(self, tokens: int, seconds: float, position: LanePosition) -> None:
        self.step += 1
        self.stage_step += 1
        self.tokens += tokens
        self.seconds += seconds
        self.stage_seconds += seconds
        self.position = position

    def fraction(self, stage: StageConfig) -> float:
        """The part of the stage that is done, by steps or by time, whichever is further on."""
        by_time = self.stage_seconds / stage.max_seconds if stage.max_seconds else 0.0
        return min(1.0, max(self.stage_step / stage.steps, by_time))

    def seconds_left(self, stage: StageConfig) -> float:
        """How long the stage will still take at the speed it had so far."""
        done = self.fraction(stage)
        return self.stage_seconds * (1.0 - done) / done if done else 0.0
