"""The training strategy of a search: joint or alternating updates, selection by the hard loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from longspan.config import RunConfig, SearchConfig, StageConfig
from longspan.errors import UserError
from longspan.evaluation import Score
from longspan.models import LanguageModel, Supernet
from longspan.models.latency import measure_costs
from longspan.optim import build_optimizers
from longspan.training import Strategy


class Searching(Strategy):
    """Trains a supernet.

    With "together", the optimizer of the stage updates everything. With "alternate", it updates the weights,
    and every `architecture_every`-th step after the warm-up the architecture's own Adam updates the
    architecture instead.
    """

    @staticmethod
    def check(config: RunConfig) -> None:
        if config.search is None:
            raise UserError(
                f"{config.name} is not a search: its configuration has no [search]; use 'longspan train'"
            )

    def __init__(self, model: LanguageModel, config: RunConfig) -> None:
        super().__init__(model, config)
        assert isinstance(model, Supernet)
        assert config.search is not None
        measure_costs(model, config)  # here the model is on its device; a checkpoint has its own costs
        self._supernet, self._search = model, config.search
        self._apart = model.architecture_parameters() if config.search.updates == "alternate" else []
        self._of_architecture = [_adam(self._apart, config.search)] if self._apart else []

    @property
    def optimizers(self) -> list[Optimizer]:
        return [*super().optimizers, *self._of_architecture]

    def optimizers_of(self, stage: StageConfig) -> list[Optimizer]:
        return build_optimizers(self.model, stage, without=self._apart)

    def moving(self, step: int, fraction: float, momentum: float | None = None) -> list[Optimizer]:
        after_warm_up = step - self._search.warm_up_steps
        if (
            self._of_architecture
            and after_warm_up > 0
            and after_warm_up % self._search.architecture_every == 0
        ):
            return self._of_architecture
        return super().moving(step, fraction, momentum)

    def judge(self, score: Callable[[], Score]) -> tuple[Score, dict[str, Score]]:
        """The hard score selects the best weights: only the most likely pattern is kept."""
        with self._supernet.evaluating("hard"):
            hard = score()
        with self._supernet.evaluating("soft"):
            return hard, {"soft": score()}

    def findings(self) -> dict[str, Any]:
        return {"pattern": self._supernet.pattern()}


def _adam(parameters: list[torch.nn.Parameter], search: SearchConfig) -> Optimizer:
    """Adam with decay of the logits. A learned temperature, the only scalar, is not decayed."""
    logits = [parameter for parameter in parameters if parameter.ndim]
    scalars = [parameter for parameter in parameters if not parameter.ndim]
    groups = [{"params": logits, "weight_decay": search.architecture_weight_decay}]
    if scalars:
        groups.append({"params": scalars, "weight_decay": 0.0})
    return torch.optim.Adam(groups, lr=search.architecture_learning_rate, fused=True)
