"""Measures a recipe."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Literal

import torch

from longspan.bench.agreement import Agreement, check_agreement
from longspan.bench.bench_paths import BenchPath, paths_for
from longspan.bench.figures import Decoding, Figures, Steps, Work
from longspan.bench.machine import matrix_rate, reading_seconds, seconds_of, watch_memory
from longspan.bench.spans import has_fixed_spans, learned_spans, set_profile
from longspan.bench.training import Training
from longspan.compile_fallback import CompileFallback
from longspan.config import RunConfig
from longspan.errors import UserError
from longspan.flops import Shape
from longspan.generation import generate
from longspan.models import LanguageModel, build_run
from longspan.progress import task
from longspan.runs.auto_options import resolved
from longspan.training.graphs import STEADY
from longspan.training.memory_plan import MemoryPlan, available_memory
from longspan.training.out_of_memory import within_memory

DECODED, DECODING_WARM_UPS = 100, 10
WARM_UPS = {"cpu": 2, "cuda": STEADY + 3}  # on a GPU this includes graph capture


class Bench:
    """One recipe on one device, with learned spans at their initial values or as in `span_profile`.

    `say` is called with progress messages.
    """

    def __init__(
        self,
        config: RunConfig,
        vocabulary_size: int,
        device: torch.device,
        *,
        spans: Literal["start", "profile"] = "start",
        say: Callable[[str], None] = print,
    ) -> None:
        if not config.stage:
            raise UserError(f"{config.name} has no [[stage]]: add one, which names the optimizer")
        self.config = resolved(config, device)  # as `longspan train` would run it here
        self.vocabulary_size, self.device = vocabulary_size, device
        self.spans, self.say = spans, say

    def check(self) -> Agreement | None:
        """Raise `UserError` if the two paths disagree; None if there is only one."""
        model = self._model()
        paths = paths_for(model, self.device)
        if len(paths) < 2:
            return None
        self.say(f"{self.config.name}: comparing the paths")
        training = self.config.training
        return check_agreement(
            model,
            *paths,
            precision=training.precision,
            block_length=training.block_length,
            name=self.config.name,
        )

    def measure(self, agreement: Agreement | None, *, steps: int, decode: bool) -> Figures:
        model, training = self._model(), self.config.training
        shape = Shape(training.batch_size, training.block_length)
        self.say(f"{self.config.name}: matrix products in {training.precision}")
        without = "fixed" if has_fixed_spans(model) else "none"
        windows = [window for span in learned_spans(model) for window in span.windows]
        work = Work(
            tokens=shape.batch_size * shape.block_length,
            flops_per_token_forward=model.flops(shape),
            matrix_flops_per_second=matrix_rate(self.device, training.precision),
        )
        paths = paths_for(model, self.device)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        del model
        return Figures(
            recipe=self.config.name,
            parameters=num_parameters,
            vocabulary_size=self.vocabulary_size,
            batch_size=shape.batch_size,
            block_length=shape.block_length,
            precision=training.precision,
            spans=self.spans if windows else without,
            mean_window=sum(windows) / len(windows) if windows else None,
            agreement=agreement,
            work=work,
            steps=[self._steps(path, steps) for path in paths],
            decoding=self._decoding() if decode else None,
        )

    def num_parameters(self) -> int:
        with torch.device("meta"):
            model = build_run(self.config, self.vocabulary_size)
        return sum(parameter.numel() for parameter in model.parameters())

    def time_steps(self, steps: int) -> tuple[MemoryPlan | None, Steps]:
        """The memory plan and some steps of the path that training takes, not compared with another path."""
        peak = watch_memory(self.device)
        model = self._model()
        path = paths_for(model, self.device)[-1]
        with within_memory(model, self.config, self.say) as plan:
            available = available_memory(model)
            if self.device.type == "cpu" and plan and available and plan.total > available:
                raise torch.OutOfMemoryError("out of memory")  # else Linux may kill the process
            seconds = self._seconds(model, path, steps)
        return plan, Steps(path.name, path.means, seconds, peak())

    def _model(self) -> LanguageModel:
        torch.manual_seed(self.config.training.seed)
        model = build_run(self.config, self.vocabulary_size).to(self.device)
        if self.spans == "profile":
            set_profile(model, self.config.name)
        return model

    def _steps(self, path: BenchPath, steps: int) -> Steps:
        peak = watch_memory(self.device)
        seconds = self._seconds(self._model(), path, steps)
        return Steps(path.name, path.means, seconds, peak())

    def _seconds(self, model: LanguageModel, path: BenchPath, steps: int) -> list[float]:
        self.say(f"{self.config.name}: {steps} steps, {path.name} path ({path.means})")
        fallback = CompileFallback(enabled=self.config.training.compile is True)
        with path.forced():  # decides what is compiled: operations with a kernel are not
            fallback.compile(model.compile)
        step = Training(model, self.config, path, fallback).step
        warm_ups = WARM_UPS.get(self.device.type, WARM_UPS["cpu"])
        with task(f"{self.config.name}, {path.name} path", "steps", warm_ups + steps) as progress:

            def counted() -> None:
                step()
                progress(progress.done + 1)

            return seconds_of(counted, self.device, times=steps, warm_ups=warm_ups)

    def _decoding(self) -> Decoding:
        self.say(f"{self.config.name}: decoding {DECODED} tokens")
        model = self._model().eval()
        floor = reading_seconds(list(model.parameters()))
        told = []
        for _ in generate(model, [0], tokens=DECODING_WARM_UPS + DECODED, temperature=0.0):
            told.append(time.perf_counter())  # the token is on the host: no synchronisation needed
        seconds = [after - before for before, after in itertools.pairwise(told)]
        return Decoding(seconds[-DECODED:], floor)
