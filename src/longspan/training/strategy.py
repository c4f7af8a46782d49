"""What kinds of training do each in its own way: which optimizers move, and how weights are judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from longspan.compile_fallback import CompileFallback
from longspan.config import RunConfig, StageConfig
from longspan.errors import UserError
from longspan.evaluation import Score
from longspan.models import LanguageModel
from longspan.optim import build_optimizers, compile_updates, memories, restore_memories, set_rate


class Strategy:
    """The plain way: every step moves all weights, and one score says how good they are."""

    @staticmethod
    def check(config: RunConfig) -> None:
        """A `UserError` if this is not the way to train what `config` describes."""
        if config.search is not None:
            raise UserError(
                f"{config.name} is a search, its configuration has [search]: use 'longspan search'"
            )

    def __init__(self, model: LanguageModel, config: RunConfig) -> None:
        self.model = model
        self.fallback = CompileFallback(enabled=config.training.compile is True)
        self.fallback.compile(model.compile)
        self._stage: StageConfig | None = None
        self._of_stage: list[Optimizer] = []

    @property
    def optimizers(self) -> list[Optimizer]:
        """All there are at present; what they remember is part of a checkpoint."""
        return self._of_stage

    def begin_stage(self, stage: StageConfig) -> None:
        """Let the optimizers of `stage` take over, knowing what those before knew if they are of one kind."""
        optimizers = self.optimizers_of(stage)
        compile_updates(optimizers, self.fallback)
        if self._stage is not None and stage.optimizer == self._stage.optimizer:
            restore_memories(self.model, optimizers, memories(self.model, self._of_stage))
        self._stage, self._of_stage = stage, optimizers

    def optimizers_of(self, stage: StageConfig) -> list[Optimizer]:
        return build_optimizers(self.model, stage)

    def moving(self, step: int, fraction: float) -> list[Optimizer]:
        """The optimizers of update number `step`, counted from 1, at this fraction of the stage's rate."""
        set_rate(self._of_stage, fraction)
        return self._of_stage

    def judge(self, score: Callable[[], Score]) -> tuple[Score, dict[str, Score]]:
        """The score by which weights are compared, and by name those that are good to know beside it."""
        return score(), {}

    def findings(self) -> dict[str, Any]:
        """What else to write beside the metrics."""
        return {}
