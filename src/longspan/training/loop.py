"""The training loop: steps, and between them metrics, evaluations, checkpoints and stages.

It knows the model's interface and no model. All that decides the next step is in a checkpoint, and what is
due between two steps follows from the counters alone: so a run that was stopped anywhere goes on as if it
had not been.
"""

from __future__ import annotations

import math
import time
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from longspan.config import StageConfig
from longspan.data import Block, Lanes, TokenizedCorpus
from longspan.evaluation import Score, evaluate
from longspan.models import LanguageModel
from longspan.optim import build_optimizers, fraction, set_rate
from longspan.runs import Checkpoint, RunFolder, checkpoint
from longspan.training import snapshot
from longspan.training.errors import Diverged, Interrupted
from longspan.training.interrupt import Interrupt
from longspan.training.lines import duration, readable, score_metrics
from longspan.training.progress import Progress
from longspan.training.records import Records
from longspan.training.reporter import Reporter
from longspan.training.step import Updater
from longspan.training.window import BadLoss, Window


class Loop:
    """One run, from its first step or from a checkpoint, to its final score."""

    def __init__(
        self,
        folder: RunFolder,
        corpus: TokenizedCorpus,
        model: LanguageModel,
        reporter: Reporter,
        resume_from: Checkpoint | None = None,
    ) -> None:
        self._folder, self._corpus, self._model, self._reporter = folder, corpus, model, reporter
        self._config = folder.config
        training = self._config.training
        self._device = next(model.parameters()).device
        self._updater = Updater(model, precision=training.precision, micro_batches=training.micro_batches)
        self._lanes = Lanes(
            corpus.splits["train"].tokens,
            training.batch_size,
            training.block_length,
            jitter=training.block_jitter,
            at_end=training.at_end,
            seed=training.seed,
        )
        self._interrupt = Interrupt()
        self._measure = ""
        if resume_from is None:
            self._begin()
        else:
            self._restore(resume_from)

    def _begin(self) -> None:
        self._progress, self._window = Progress(), Window()
        self._optimizers: list[Optimizer] = build_optimizers(self._model, self._stage)
        self._state = self._model.initial_state(self._config.training.batch_size)
        self._records = Records(self._folder)
        self._saved, self._unsaved = 0, False

    def _restore(self, saved: Checkpoint) -> None:
        facts = saved.facts
        self._progress = Progress.from_json(facts["progress"])
        self._window = Window.from_json(facts["window"])
        self._optimizers = build_optimizers(self._model, self._stage)
        self._state = snapshot.unpack(saved, self._model, self._optimizers, self._device)
        self._updater.scaler.load_state_dict(facts["scaler"])
        self._records = Records(self._folder, facts["lengths"], self._progress.step)
        self._saved, self._unsaved = self._progress.step, False

    def run(self) -> None:
        """Train to the end, or raise `Interrupted` with everything saved."""
        try:
            with self._interrupt:
                self._train()
                self._finish()
        except Interrupted:
            if self._unsaved:
                self._save("last")
            raise
        finally:
            self._records.close()

    @property
    def _stage(self) -> StageConfig:
        return self._config.stage[self._progress.stage]

    def _train(self) -> None:
        training, progress = self._config.training, self._progress
        while True:
            if self._due(training.evaluate_every) and progress.evaluated != progress.step:
                self._evaluate()
            if self._due(training.checkpoint_every) and self._unsaved:
                self._save("last")
            self._interrupt.check()
            if not self._find_stage():
                return
            begun = time.perf_counter()
            block = self._lanes.next(progress.position)
            if block is None:
                return
            self._step(block, begun)
            if self._due(training.log_every):
                self._log()

    def _due(self, every: int) -> bool:
        return every > 0 and self._progress.step > 0 and self._progress.step % every == 0

    def _find_stage(self) -> bool:
        """Move on from stages that are over; false when all are."""
        while self._progress.stage_is_over(self._stage):
            if self._progress.stage + 1 == len(self._config.stage):
                return False
            self._progress.begin_next_stage()
            self._optimizers = build_optimizers(self._model, self._stage)
        return True

    def _step(self, block: Block, begun: float) -> None:
        stage, progress = self._stage, self._progress
        if block.begins:
            self._state = self._model.initial_state(block.tokens_BT.shape[0])
        part = fraction(stage, progress.stage_step + 1, progress.stage_seconds)
        set_rate(self._optimizers, part)
        progress.learning_rate = stage.learning_rate * part
        clip_norm = 0.0 if stage.optimizer == "adagrad" else stage.clip_norm  # adagrad clips on its own
        nats, self._state = self._updater.update(
            block.tokens_BT, block.targets_BT, self._state, self._optimizers, clip_norm
        )
        tokens, seconds = block.tokens_BT.numel(), time.perf_counter() - begun
        progress.count_step(tokens, seconds, block.position)
        self._window.add(nats, tokens, seconds, progress.step, progress.learning_rate)
        self._unsaved = True
        self._show_status()

    def _log(self) -> None:
        self._check_losses()
        progress, window = self._progress, self._window
        line: dict[str, Any] = {
            "kind": "train",
            "step": progress.step,
            "stage": self._stage.name,
            "loss": window.loss,
            "learning_rate": progress.learning_rate,
            "tokens": progress.tokens,
            "seconds": progress.seconds,
            "tokens_per_second": window.tokens / window.seconds,
        }
        train = self._corpus.splits["train"]
        if len(train) == train.num_bytes:  # else nobody has counted the bytes of just these tokens
            line["bits_per_byte"] = window.loss / math.log(2)
        spans_LH = self._model.diagnostics().get("spans_LH")
        if spans_LH is not None:
            line |= {"span_mean": float(spans_LH.mean()), "span_max": float(spans_LH.max())}
            self._records.write_spans(progress.step, spans_LH.tolist())
        self._records.write(line)
        self._reporter.log(readable(line))
        self._measure = f"loss {window.loss:.3f}"
        self._window = Window()
        self._unsaved = True

    def _evaluate(self) -> None:
        self._check_finite()
        score = self._score("valid", self._config.evaluation.max_tokens)
        progress = self._progress
        progress.evaluated = progress.step
        self._unsaved = True
        best = progress.best_loss is None or score.loss < progress.best_loss
        if best:
            progress.best_loss, progress.best_step = score.loss, progress.step
        line = {
            "kind": "valid",
            "step": progress.step,
            "stage": self._stage.name,
            **score_metrics(score),
            "best": best,
            "seconds": progress.seconds,
        }
        self._records.write(line)
        self._reporter.say(readable(line))
        if best:
            self._save("best")

    def _finish(self) -> None:
        """Score the best weights on all that is held out; the line that says so makes the run finished."""
        progress = self._progress
        if self._window.tokens:
            self._log()
        if progress.evaluated != progress.step:
            self._evaluate()
        if self._unsaved:
            self._save("last")
        best = checkpoint.load(self._folder.checkpoint("best"))
        self._model.load_state_dict(best.below("model"))
        limit = self._config.evaluation.max_tokens_final
        scores = {split: score_metrics(self._score(split, limit)) for split in ("valid", "test")}
        self._records.write({"kind": "final", "step": progress.best_step, "checkpoint": "best", **scores})
        self._records.settle()

    def _score(self, split: str, max_tokens: int | None) -> Score:
        def show(done: int, total: int) -> None:
            self._interrupt.check()
            self._reporter.status(f"scoring {split}: {done:,} of {total:,} tokens", done / total)

        score = evaluate(
            self._model,
            self._corpus.splits[split],
            tokenizer=self._corpus.tokenizer,
            config=self._config.evaluation,
            block_length=self._config.training.block_length,
            max_tokens=max_tokens,
            device=self._device,
            progress=show,
        )
        if not math.isfinite(score.nats):
            raise self._diverged(f"the {split} loss is {score.nats}", self._progress)
        return score

    def _save(self, which: Literal["last", "best"]) -> None:
        """Write a checkpoint; weights that are not finite never get that far."""
        self._check_finite()
        facts = {
            "progress": self._progress.to_json(),
            "window": self._window.to_json(),
            "scaler": self._updater.scaler.state_dict(),
            "corpus": self._corpus.fingerprint,
            "lengths": self._records.settle(),
        }
        tensors = snapshot.pack(self._model, self._optimizers, self._state, self._device)
        checkpoint.save(self._folder.checkpoint(which), tensors, facts)
        if which == "last":
            self._saved, self._unsaved = self._progress.step, False

    def _check_losses(self) -> None:
        bad = self._window.read()
        if bad is not None:
            raise self._diverged(f"the loss is {bad.loss}", bad)

    def _check_finite(self) -> None:
        self._check_losses()
        norms = torch.stack(torch._foreach_norm(list(self._model.parameters())))
        if not bool(norms.isfinite().all()):
            raise self._diverged("the weights are no longer finite", self._progress)

    def _diverged(self, what: str, at: Progress | BadLoss) -> Diverged:
        good = f"the last good checkpoint is {self._folder.checkpoint('last')} of step {self._saved}"
        return Diverged(
            f"{what} at step {at.step} with learning rate {at.learning_rate:.3g}: try a lower one; "
            f"{good if self._saved else 'there is no checkpoint yet'}"
        )

    def _show_status(self) -> None:
        stage, progress = self._stage, self._progress
        self._reporter.status(
            f"{stage.name} step {progress.step:,}  {self._measure}  "
            f"{progress.tokens / progress.seconds:,.0f} tokens/s  "
            f"{duration(progress.seconds_left(stage))} left",
            progress.fraction(stage),
        )
