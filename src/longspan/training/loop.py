"""The training loop: steps, and between them metrics, evaluations, checkpoints and stages.

It uses only the model interface and knows no model. A `Strategy` has what differs between kinds of training.
A checkpoint holds everything that decides the next step, and what is due between two steps follows from the
counters alone. So a resumed run continues exactly as if it had not been stopped.

Under torchrun every rank runs this loop on its own lanes. The ranks agree on what depends on a clock or on a
signal, so all of them take the same decisions. Rank 0 alone writes metrics and logs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from longspan import distributed
from longspan.config import StageConfig
from longspan.data import GivenTokens, TokenBlock, TokenizedCorpus
from longspan.models import LanguageModel
from longspan.optim import fraction, momentum, multi_token_weights, undeclared_notice
from longspan.runs import Checkpoint, RunFolder, checkpoint
from longspan.runs.load_weights import trained
from longspan.runs.resume_checks import fixed_options
from longspan.training import memorised, parallel, train_state
from longspan.training.averaging import Average
from longspan.training.checkpoint_writer import CheckpointWriter
from longspan.training.clock import Clock
from longspan.training.compile_warmup import warm_up_compilation
from longspan.training.divergence import DivergenceCheck
from longspan.training.errors import Interrupted, Stopped
from longspan.training.formatting import readable, scalars, status, train_line, valid_line
from longspan.training.interrupt import Interrupt
from longspan.training.loss_meter import LossMeter
from longspan.training.records import NoRecords, Records
from longspan.training.reporter import Reporter
from longspan.training.run_progress import RunProgress
from longspan.training.sample_text import sample_text
from longspan.training.scoring import Scoring
from longspan.training.stage_blocks import StageBlocks
from longspan.training.step import Updater
from longspan.training.strategy import Strategy
from longspan.training.threads import CoreWait


class Loop:
    """One run, from its first step or from a checkpoint, to its final score."""

    def __init__(
        self,
        folder: RunFolder,
        corpus: TokenizedCorpus | GivenTokens,
        model: LanguageModel,
        reporter: Reporter,
        resume_from: Checkpoint | None = None,
        strategy: type[Strategy] = Strategy,
        callback: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        self._folder, self._corpus, self._model, self._reporter = folder, corpus, model, reporter
        self._config = folder.config
        self._strategy = strategy(model, self._config)
        self._callback = callback
        training = self._config.training
        self._lanes = distributed.share(training.batch_size)
        sharded = parallel.sharded(training)
        if sharded:
            parallel.shard(model, detach_states=training.accumulate == 1)
        self._device = next(model.parameters()).device
        self._updater = Updater(
            model,
            precision=training.precision,
            micro_batches=training.micro_batches,
            fallback=self._strategy.fallback,
            capture=not training.block_jitter and training.accumulate == 1,
            sharded=sharded,
        )
        self._blocks = StageBlocks(corpus, self._config, self._lanes, self._device)
        self._average = Average(model, training.average) if training.average else None
        self._divergence = DivergenceCheck(folder, model)
        self._writer = CheckpointWriter(folder, sharded=sharded)
        self._interrupt = Interrupt()
        self._scoring = Scoring(
            model,
            corpus,
            self._config,
            strategy=self._strategy,
            device=self._device,
            divergence=self._divergence,
            interrupt=self._interrupt,
            reporter=reporter,
        )
        self._clock = Clock()
        self._saved_at = time.monotonic()
        self._measure, self._train_loss = "", math.inf
        self._estimated_stages = list(map(self._blocks.with_estimated_steps, self._config.stage))
        # How many steps fit into a time is not known.
        by_time = any(stage.max_seconds is not None for stage in self._config.stage)
        self._steps = None if by_time else sum(stage.steps or 0 for stage in self._estimated_stages)
        if resume_from is None:
            self._begin()
        else:
            with train_state.complete(folder.checkpoint("last")):
                self._restore(resume_from)

    def _begin(self) -> None:
        self._progress, self._loss_meter, self._done = RunProgress(), LossMeter(), 0.0
        self._begin_stage()
        self._state = distributed.initial_state(self._model, len(self._lanes))
        self._records = self._own_records()
        self._unsaved = False

    def _restore(self, saved: Checkpoint) -> None:
        facts = saved.facts
        self._progress = RunProgress.from_json(facts["progress"])
        self._loss_meter = LossMeter.from_json(facts["loss_meter"])
        if not checkpoint.exists(self._folder.checkpoint("best")):  # the next evaluation writes a new one
            self._progress.forget_best()
        self._done = trained(
            facts, self._folder.checkpoint("last"), self._progress.done(self._estimated_stages)
        )
        self._begin_stage()
        self._state = train_state.unpack(
            saved,
            self._model,
            self._strategy.optimizers,
            self._device,
            self._lanes,
            self._average,
            same_numbers=self._config.search is not None,
        )
        self._updater.scaler.load_state_dict(facts["scaler"])
        self._records = self._own_records(facts["lengths"], self._progress.step)
        self._unsaved = False

    def _own_records(self, lengths: Mapping[str, int] | None = None, step: int = 0) -> Records | NoRecords:
        return Records(self._folder, lengths, step) if distributed.is_first() else NoRecords()

    def run(self) -> None:
        """Train to the end. On `Interrupted` and `Stopped` everything is saved first."""
        if (notice := undeclared_notice(self._model, self._config.stage)) is not None:
            self._reporter.say(notice)
        try:
            with self._interrupt:
                self._train_or_save()
        finally:
            self._records.close()

    def _train_or_save(self) -> None:
        try:
            with self._blocks:
                self._train()
                self._finish()
        except (Interrupted, Stopped) as stop:
            if self._unsaved:
                again = isinstance(stop, Interrupted) and not distributed.launched()
                without = "; a second SIGINT or SIGTERM would stop without it" if again else ""
                self._reporter.say(f"saving a checkpoint{without}")
                self._save("last")
            self._writer.wait()
            raise

    @property
    def _stage(self) -> StageConfig:
        return self._config.stage[self._progress.stage]

    def _train(self) -> None:
        training, progress = self._config.training, self._progress
        if training.compile_warmup:
            warm_up_compilation(
                training.compile_warmup,
                self._updater,
                self._strategy,
                self._stage,
                self._blocks.prefetcher,
                progress.position,
                self._state,
                self._done_now(),
            )
        self._model.progress(self._done)  # an evaluation may be due before the next step
        self._clock.lap()  # time spent before this point is not training time
        while True:
            if self._due(training.evaluate_every) and progress.evaluated != progress.step:
                self._evaluate()
            if self._unsaved and (self._due(training.checkpoint_every) or self._minutes_are_over()):
                self._save("last")
            self._interrupt.check()
            if progress.out_of_patience(training.patience):
                self._reporter.say(
                    f"stopping early: no better score in {progress.since_best} evaluations since step "
                    f"{progress.best_step:,}"
                )
                return
            if not self._find_stage():
                return
            blocks = self._blocks.of_update(progress.position)
            if not blocks:
                self._reporter.say(
                    f"the text ended after step {progress.step:,}, {self._done_now():.1%} of the training: "
                    "learning rates and growing spans did not reach their end; give the stages fewer steps"
                )
                return
            if progress.count_epochs(blocks[0].position.epoch):
                self._unsaved = True
                if progress.stage_is_over(self._stage):
                    continue
            self._step(blocks)
            if self._due(training.log_every):
                self._log()

    def _due(self, every: int) -> bool:
        return every > 0 and self._progress.step > 0 and self._progress.step % every == 0

    def _minutes_are_over(self) -> bool:
        minutes = self._config.training.checkpoint_minutes
        return minutes > 0 and bool(distributed.from_first(time.monotonic() - self._saved_at > 60 * minutes))

    def _find_stage(self) -> bool:
        """Move to the next stage that is not over; false when all are."""
        while self._progress.stage_is_over(self._stage):
            if (notice := self._core_wait.notice(self._stage, self._progress.stage_step)) is not None:
                self._reporter.say(notice)
            if self._progress.stage + 1 == len(self._config.stage):
                return False
            self._progress.begin_next_stage(self._config.stage[self._progress.stage + 1])
            self._begin_stage()
        return True

    def _begin_stage(self) -> None:
        self._core_wait = CoreWait()
        self._strategy.begin_stage(self._stage)
        self._blocks.begin_stage(self._stage)

    def _step(self, blocks: list[TokenBlock]) -> None:
        stage, progress = self._stage, self._progress
        block, *more = blocks
        if block.begins:
            self._state = distributed.initial_state(self._model, block.tokens_BT.shape[0])
        self._model.begin_epoch(block.position.epoch)
        self._done = self._done_now()
        self._model.progress(self._done)
        epochs = self._blocks.epochs_before(block, progress.stage_epochs)
        now = (progress.stage_step + 1, progress.stage_seconds, epochs)
        part = fraction(stage, *now)
        progress.learning_rate = stage.learning_rate * part
        # Adagrad clips each tensor itself.
        clip_norm = 0.0 if stage.optimizer == "adagrad" else stage.clip_norm
        moving = self._strategy.moving(progress.step + 1, part, momentum(stage, *now))
        nats, self._state = self._updater.update(
            block.tokens_BT,
            block.targets_BT,
            self._state,
            moving,
            clip_norm,
            clip_value=stage.clip_value,
            more=more,
            multi_token=multi_token_weights(stage, *now),
        )
        tokens = sum(block.tokens_BT.numel() for block in blocks) * distributed.size()
        progress.count_step(tokens, blocks[-1].position)
        if self._average is not None:
            self._average.follow(progress.step)
        self._loss_meter.add(nats, tokens, progress.step, progress.learning_rate)
        self._count_time()
        self._unsaved = True
        self._show_status()

    def _done_now(self) -> float:
        """The fraction of the training that is done. A run that was extended does not go back."""
        return max(self._done, self._progress.done(self._estimated_stages))

    def _count_time(self) -> None:
        """Add the time since the last lap to the training time."""
        seconds = self._clock.lap()
        if any(stage.max_seconds is not None for stage in self._config.stage):
            seconds = distributed.from_first(seconds)  # ranks must end a stage at the same step
        self._progress.count_time(seconds)
        self._loss_meter.seconds += seconds

    @contextmanager
    def _outside_training_time(self) -> Iterator[None]:
        """Exclude the time in this context from the training time, after checking losses and weights.

        The checks synchronise with the device: work it has not finished counts as training.
        """
        self._divergence.check_losses(self._loss_meter)
        self._divergence.check_weights(self._progress)
        self._count_time()
        try:
            yield
        finally:
            self._clock.lap()

    def _with_averaged_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has the averaged weights, if the run keeps an average."""
        return nullcontext() if self._average is None else self._average.in_place()

    def _log(self) -> None:
        self._divergence.check_losses(self._loss_meter)  # synchronises, so the time below is right
        self._count_time()
        progress, meter = self._progress, self._loss_meter
        line = train_line(progress, meter, self._stage, self._corpus) | self._strategy.findings()
        seen = scalars(self._model.diagnostics(), taken=line)
        for name, fields in self._model.records().items():
            self._records.write_record(name, progress.step, fields)
        line |= seen
        self._records.write(line)
        left = progress.seconds_left(self._estimated_stages)
        self._reporter.log(readable(line, seen, steps=self._steps, seconds_left=left))
        self._measure, self._train_loss = f"loss {meter.loss:.3f}", meter.loss
        self._loss_meter = LossMeter()
        self._unsaved = True
        self._call_back(line)

    def _call_back(self, line: dict[str, Any]) -> None:
        """Pass a line of metrics to the callback, which returns False to stop the run."""
        if self._callback is None:
            return
        if distributed.any_rank(distributed.is_first() and self._callback(dict(line)) is False):
            raise Stopped("the callback returned False")

    def _evaluate(self) -> None:
        """The model is scored with what the last step was told of the progress, and at the end with 1."""
        progress = self._progress
        if progress.stage + 1 == len(self._config.stage) and progress.stage_is_over(self._stage):
            self._done = 1.0
            self._model.progress(1.0)
        with self._outside_training_time(), self._with_averaged_weights():
            score, figures = self._scoring.judge("valid", self._config.evaluation.max_tokens, progress)
            findings = self._strategy.findings()
            self._write_sample()
        best = progress.count_score(score.loss)
        self._unsaved = True
        line = valid_line(progress, self._stage, figures | findings, best=best)
        self._records.write(line)
        self._reporter.score(readable(line, steps=self._steps))
        if best:
            self._save("best")
        self._call_back(line)

    def _write_sample(self) -> None:
        """Add a text to samples.jsonl. A sharded model gathers its weights: then every rank takes part."""
        training = self._config.training
        if training.sample_tokens and (training.shard or distributed.is_first()):
            text = sample_text(
                self._model, self._corpus.tokenizer, training.sample_tokens, training.seed, self._device
            )
            self._records.write_record("samples", self._progress.step, {"text": text})

    def _finish(self) -> None:
        """Score the best weights on the held-out splits; the `final` line marks the run as finished."""
        progress = self._progress
        if self._loss_meter.tokens:
            self._log()
        if progress.evaluated != progress.step:
            self._evaluate()
        if self._unsaved:
            self._save("last")
        self._writer.wait()
        path = self._folder.checkpoint("best")
        best = checkpoint.load(path)
        train_state.load_weights(self._model, best.below("model"))
        self._model.progress(trained(best.facts, path))
        limit, held_out = self._config.evaluation.max_tokens_final, self._corpus.splits
        line = {
            "kind": "final",
            "step": progress.best_step,
            "checkpoint": "best",
            **self._strategy.findings(),
        }
        for split in ("valid", "test"):
            if split in held_out:
                _, line[split] = self._scoring.judge(split, limit, progress)
        self._records.write(line)
        self._records.sync()
        losses = {"train_loss": self._train_loss, "valid_loss": line["valid"]["loss"]}
        notice = memorised.notice(self._config.training, self._corpus, tokens=progress.tokens, **losses)
        if notice is not None:
            self._reporter.say(notice)

    def _save(self, which: Literal["last", "best"]) -> None:
        judged = self._with_averaged_weights() if which == "best" else nullcontext()
        with self._outside_training_time(), judged:
            facts = {
                "fixed_options": fixed_options(self._config, self._progress.stage),
                "progress": self._progress.to_json(),
                "done": self._done,
                "loss_meter": self._loss_meter.to_json(),
                "scaler": self._updater.scaler.state_dict(),
                "lengths": self._records.sync(),
                "optimizer_tensors": train_state.optimizer_tensors(self._model, self._strategy.optimizers),
            }
            tensors = train_state.pack(
                self._model, self._strategy.optimizers, self._state, self._device, self._average
            )
            self._writer.save(which, tensors, facts)
        if which == "last":
            self._unsaved, self._saved_at = False, time.monotonic()

    def _show_status(self) -> None:
        progress = self._progress
        left = progress.seconds_left(self._estimated_stages)
        text = status(progress, self._stage, self._measure, left)
        self._reporter.status(text, progress.seconds / (progress.seconds + left))
