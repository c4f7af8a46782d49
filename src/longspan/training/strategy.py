"""What differs between kinds of training: which optimizers step, and which score selects weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from longspan.compile_fallback import CompileFallback
from longspan.config import RunConfig, StageConfig
from longspan.errors import UserError
from longspan.evaluation import Score
from longspan.models import LanguageModel
from longspan.optim import (
    build_optimizers,
    compile_updates,
    memories,
    restore_memories,
    set_momentum,
    set_rate,
)


class Strategy:
    """Plain training: every step updates all weights, and one score selects the best."""

    @staticmethod
    def check(config: RunConfig) -> None:
        """Raise `UserError` if this strategy cannot train what `config` describes."""
        if config.search is not None:
            raise UserError(
                f"{config.name} is a search (its configuration has [search]): use 'longspan search'"
            )

    def __init__(self, model: LanguageModel, config: RunConfig) -> None:
        self.model = model
        self.fallback = CompileFallback(enabled=config.training.compile is True)
        self.fallback.compile(model.compile)
        self._stage: StageConfig | None = None
        self._of_stage: list[Optimizer] = []

    @property
    def optimizers(self) -> list[Optimizer]:
        """All current optimizers; checkpoints include their states."""
        return self._of_stage

    def begin_stage(self, stage: StageConfig) -> None:
        """Build the optimizers of `stage`. They take over the state of the previous ones of the same kind."""
        optimizers = self.optimizers_of(stage)
        compile_updates(optimizers, self.fallback)
        if self._stage is not None and stage.optimizer == self._stage.optimizer:
            restore_memories(self.model, optimizers, memories(self.model, self._of_stage))
        self._stage, self._of_stage = stage, optimizers

    def optimizers_of(self, stage: StageConfig) -> list[Optimizer]:
        return build_optimizers(self.model, stage)

    def moving(self, step: int, fraction: float, momentum: float | None = None) -> list[Optimizer]:
        """The optimizers that step in update number `step`, counted from 1, with their rates set.

        `fraction` is the part of the stage's learning rate. A `momentum` is set too, where there is one.
        """
        set_rate(self._of_stage, fraction)
        if momentum is not None:
            set_momentum(self._of_stage, momentum)
        return self._of_stage

    def judge(self, score: Callable[[], Score]) -> tuple[Score, dict[str, Score]]:
        """The score by which weights are compared, and further scores to report, by name."""
        return score(), {}

    def findings(self) -> dict[str, Any]:
        """Further fields for lines of metrics."""
        return {}
