"""Training steps on random tokens. Shapes: B lanes, T block."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.bench.bench_paths import BenchPath
from longspan.compile_fallback import CompileFallback
from longspan.config import RunConfig
from longspan.models import LanguageModel
from longspan.optim import build_optimizers, compile_updates, set_rate
from longspan.training.step import Updater


class Training:
    """Training steps of a recipe on one path, with carried state unless a segment is one block."""

    def __init__(
        self,
        model: LanguageModel,
        config: RunConfig,
        path: BenchPath,
        fallback: CompileFallback | None = None,
    ) -> None:
        """`fallback` is the `CompileFallback` of a compiled model."""
        training, self._stage = config.training, config.stage[0]
        fallback = fallback or CompileFallback(enabled=training.compile is True)
        self.path = path
        self.updater = Updater(
            model,
            precision=training.precision,
            micro_batches=training.micro_batches,
            fallback=fallback,
            capture=path.captured,
        )
        self.optimizers = build_optimizers(model, self._stage)
        compile_updates(self.optimizers, fallback)
        # With a rate of 0 an update does all its work, but spans stay as they were set.
        set_rate(self.optimizers, 0.0)
        self._generator = torch.Generator().manual_seed(1)
        self._shape = (training.batch_size, training.block_length + 1)
        self._carries = training.segment_length != training.block_length
        self._begin()

    def _begin(self) -> None:
        self.state = self.updater.model.initial_state(self._shape[0])

    def step(self) -> Tensor:
        if not self._carries:
            self._begin()
        tokens = torch.randint(self.updater.model.vocabulary_size, self._shape, generator=self._generator)
        # Adagrad clips each tensor itself.
        clip_norm = 0.0 if self._stage.optimizer == "adagrad" else self._stage.clip_norm
        with self.path.forced():
            nats, self.state = self.updater.update(
                tokens[:, :-1], tokens[:, 1:], self.state, self.optimizers, clip_norm
            )
        return nats
