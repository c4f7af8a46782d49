"""Starts a run, or resumes one that was stopped."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from longspan import distributed
from longspan.config import RunConfig, TrainingConfig
from longspan.data import GivenTokens, LanePosition, TokenizedCorpus, check_fits, corpora, prepare
from longspan.errors import UserError, is_out_of_memory
from longspan.evaluation.protocols import PROTOCOLS
from longspan.flops import Shape
from longspan.inspection.report import write_report
from longspan.models import LanguageModel, build_run
from longspan.optim import build_optimizers
from longspan.runs import Checkpoint, RunFolder, checkpoint, lock, pick_device
from longspan.runs.auto_options import resolved
from longspan.runs.environment import device_name, differences, environment
from longspan.runs.init import Init
from longspan.runs.load_weights import check_weights
from longspan.runs.resume_checks import check_resumable, fixed_options
from longspan.testing import ContractError, check_model
from longspan.training import changed_options, initial_weights, parallel, resume_point
from longspan.training.deterministic import deterministic
from longspan.training.loop import Loop
from longspan.training.out_of_memory import within_memory
from longspan.training.reporter import Reporter
from longspan.training.run_log import RunLog
from longspan.training.run_progress import RunProgress
from longspan.training.strategy import Strategy
from longspan.training.threads import cpu_threads
from longspan.training.wandb_logger import find_wandb

Callback = Callable[[dict[str, Any]], object]


def train(
    config: RunConfig,
    out: Path,
    *,
    given: GivenTokens | None = None,
    init: Init | None = None,
    reporter: Reporter | None = None,
    strategy: type[Strategy] = Strategy,
    callback: Callback | None = None,
) -> RunFolder:
    """Train what `config` describes into the new folder `out`, on its corpus or on the tokens `given`.

    With `init` it starts from the weights of another run, by default with the tokenizer of that run.
    `callback` gets every line of training and validation metrics; if it returns False the run is saved and
    `Stopped` is raised. At the end the weights with the best validation loss are scored on the validation and
    test splits. SIGINT, SIGTERM and SIGHUP save the run and raise `Interrupted`; a loss that is not finite
    raises `Diverged`.
    """
    RunFolder.must_be_new(out)
    strategy.check(config)
    if not config.stage:
        raise UserError("there is nothing to train: the configuration has no [[stage]]")
    if init is not None and config.search is not None:
        raise UserError("a search begins with new weights: leave out --init")
    if init is not None:
        init.check()
    device = pick_device(config.training.device)  # fails before the corpus is prepared
    asked, config = config.training, resolved(config, device)
    if config.training.logger == "wandb":
        find_wandb()
    with (
        distributed.joined(device, config.training.timeout_seconds),
        _log(reporter) as log,
        cpu_threads(config.training.threads),
        deterministic(config.training.deterministic),
    ):
        _check_lanes(config.training)
        out = Path(distributed.text_from_first(str(out)))  # the first free name may differ between ranks
        _warn_of_long_warmups(config)
        corpus: TokenizedCorpus | GivenTokens
        if given is None:
            config, tokenizer = initial_weights.with_tokenizer(init, config, log)
            corpus = prepare(config.data, log.say, tokenizer)
        else:
            corpus = given
        _check_fits(config, corpus)
        _check_can_be_scored(config, corpus)
        if given is not None and given.blocks is not None and given.blocks.next(LanePosition()) is None:
            raise UserError("there is nothing to train on: data['train'] has no blocks")
        if given is not None and given.blocks is not None and not given.blocks.can_go_back:
            _check_reads_once(config.training)
        with _own_random_numbers(config.training.seed, device):
            # What fails here leaves no folder behind, so that a corrected command can use its name.
            model = _build_model(config, corpus, device)
            started_from = None
            if init is not None:
                started_from = initial_weights.load_first(init, model, config, corpus.tokenizer, log)
            for stage in config.stage:
                build_optimizers(model, stage)
            if config.plugins:
                _check_interface(model, device)
            stored = _with_absolute_corpus(config)
            with distributed.first_before_others():
                if distributed.is_first():
                    folder = RunFolder.create(out, stored, corpus.tokenizer, corpus.fingerprint, started_from)
                else:
                    folder = RunFolder.open(out)
            with lock.for_training(folder):
                _run(folder, corpus, model, log, None, strategy, callback, asked)
    return folder


def resume(
    run: Path,
    config: RunConfig | None = None,
    *,
    given: GivenTokens | None = None,
    init: Init | None = None,
    reporter: Reporter | None = None,
    strategy: type[Strategy] = Strategy,
    callback: Callback | None = None,
) -> RunFolder:
    """Continue a stopped run as if it had not been stopped; a finished run is left as it is.

    A run that was trained on tokens passed from Python needs the same tokens again, as `given`.
    `config` and `init` are those of a command that starts the run or resumes it. The options that may change
    on resume are changed in config.toml; the others must be as they were.
    """
    folder = RunFolder.open(run)
    before = None
    if config is not None:
        before, folder.config = folder.config, changed_options.with_options(folder, config, init)
    strategy.check(folder.config)
    if not folder.config.stage:
        raise UserError(f"{run} cannot be resumed: its configuration has no [[stage]]")
    training = folder.config.training
    with (
        distributed.joined(pick_device(training.device), training.timeout_seconds),
        _log(reporter) as log,
        cpu_threads(training.threads),
        deterministic(training.deterministic),
    ):
        _check_lanes(training)
        # Rank 0 decides, since the others may read while it changes the folder.
        advice = _finished(folder, before) if distributed.is_first() else None
        if advice := distributed.text_from_first(advice or ""):
            if before is not None:  # a changed option must not be ignored silently
                check_resumable("the command", folder.config, 0, fixed_options(before, 0))
                if changes := changed_options.differences(before, folder.config):
                    advice += f" (not applied: {', '.join(changes)})"
            log.say(f"{run} is finished: {advice}")
            return folder
        with lock.for_training(folder):
            _continue_run(folder, before, given, log, strategy, callback)
    return folder


def is_finished(folder: RunFolder) -> bool:
    """Whether a run has its final score; false again if steps or stages were added to config.toml since."""
    return _finished(folder, None) is not None


def _finished(folder: RunFolder, before: RunConfig | None) -> str | None:
    """What to do with a run that is finished; None if it is not. `before` is as in `_continue_run`."""
    if folder.final() is None:
        return None
    training = folder.config.training
    if training.at_end == "stop":
        return "nothing to do"
    last = folder.checkpoint("last")
    try:
        progress = RunProgress.from_json(checkpoint.load(last).facts["progress"]) if last.exists() else None
    except (UserError, KeyError, TypeError):
        progress = None
    if progress is None:  # the checkpoint is lost or incomplete; the final score exists
        longer = before is not None and before.stage != folder.config.stage
        return None if longer else "nothing to do"
    if progress.out_of_patience(training.patience):
        return (
            f"it had no better score in {progress.since_best} evaluations; to go on, raise training.patience"
        )
    left = folder.config.stage[progress.stage :]
    return "nothing to do" if len(left) < 2 and all(map(progress.stage_is_over, left)) else None


def _continue_run(
    folder: RunFolder,
    before: RunConfig | None,
    given: GivenTokens | None,
    log: RunLog,
    strategy: type[Strategy],
    callback: Callback | None,
) -> None:
    """`before` is what config.toml holds, if a command gives other options."""
    device = pick_device(folder.config.training.device)
    saved = resume_point.load(folder, log)
    folder.config = config = resolved(folder.config, device)  # config.toml has `auto` only if it was edited
    changes = [] if before is None else changed_options.differences(before, config)
    if saved is not None:
        _check_unchanged(folder, saved, "the command" if changes else folder.path / "config.toml")
    elif before is not None:
        text = {n: value for n, value in fixed_options(before, 0).items() if n.startswith("data.")}
        check_resumable("the command", config, 0, text)
    if given is None and not config.data.corpus:
        raise UserError(
            f"{folder.path} was trained on tokens passed from Python: continue it there with "
            f"longspan.resume('{folder.path}', data=...) and the same tokens"
        )
    if given is not None and config.data.corpus:
        raise UserError(
            f"{folder.path} was trained on the corpus {config.data.corpus}: resume it without data"
        )
    started_from = folder.started_from
    tokenizer = folder.tokenizer() if started_from is not None and started_from["tokenizer"] else None
    corpus = given or prepare(config.data, log.say, tokenizer)
    if corpus.fingerprint != folder.fingerprint:
        what = f"the text of {corpus.name} has" if given is None else f"{corpus.name} have"
        raise UserError(f"{what} changed since {folder.path} began: start a new run")
    _check_fits(config, corpus)
    if saved is not None and given is not None and given.blocks is not None and not given.blocks.can_go_back:
        raise UserError(
            f"{folder.path} cannot be resumed from an iterator: pass as data['train'] a function that takes "
            "a block number and returns the blocks from there on"
        )
    changed = differences(folder.environment, environment(device))
    if changed:
        log.say(f"{', '.join(changed)}: results may differ in their last bits")
    step = saved.facts["progress"]["step"] if saved else 0
    log.say(f"continuing {folder.path} after step {step:,}")
    with _own_random_numbers(config.training.seed, device):
        model = _build_model(config, corpus, device)
        if saved is not None:
            check_weights(model, saved.below("model"), folder.checkpoint("last"))
        elif started_from is not None:
            initial_weights.load_again(folder, model)
        if changes:
            log.say(f"changed in {folder.path / 'config.toml'}: {', '.join(changes)}")
            if distributed.is_first():
                changed_options.store(folder)
        _run(folder, corpus, model, log, saved, strategy, callback, config.training)


def _with_absolute_corpus(config: RunConfig) -> RunConfig:
    """The same configuration with an absolute path to the corpus, valid from any working directory."""
    if not config.data.corpus:
        return config
    return replace(config, data=replace(config.data, corpus=corpora.anchored(config.data.corpus)))


def _warn_of_long_warmups(config: RunConfig) -> None:
    for stage in config.stage:
        if stage.steps is not None and stage.warmup_steps > stage.steps:
            warnings.warn(
                f"the warm-up of stage '{stage.name}' is longer than the stage ({stage.warmup_steps:,} of "
                f"{stage.steps:,} steps): the learning rate never reaches {stage.learning_rate:g}",
                stacklevel=3,
            )


def _check_lanes(training: TrainingConfig) -> None:
    """Raise if the batch cannot be divided over the ranks, before anything is written."""
    lanes = len(distributed.share(training.batch_size))
    if training.micro_batches > lanes:
        raise UserError(
            f"training.micro_batches is {training.micro_batches}, but each of {distributed.size()} processes "
            f"has only {lanes} lanes of the batch: lower it, or raise training.batch_size"
        )


def _check_fits(config: RunConfig, corpus: TokenizedCorpus | GivenTokens) -> None:
    training = config.training
    if isinstance(corpus, GivenTokens) and corpus.blocks is not None:
        longest = max(map(config.block_length, config.stage))
        corpus.blocks.expect(training.batch_size, longest)
        return
    text, lanes = corpus.splits["train"], training.batch_size
    if training.segment_length is None:
        check_fits(text, lanes, max(map(config.block_length, config.stage), default=training.block_length))
    else:
        check_fits(text, lanes, training.segment_length, unit="segment")


def _check_reads_once(training: TrainingConfig) -> None:
    if training.compile_warmup:
        raise UserError(
            "training.compile_warmup reads the first blocks twice, and an iterator gives them once: set it "
            "to 0, or pass as data['train'] a function that returns the blocks from a number on"
        )


def _check_can_be_scored(config: RunConfig, corpus: TokenizedCorpus | GivenTokens) -> None:
    """Raise now, not after hours of training, if held-out text is too short for its protocol."""
    evaluation = config.evaluation
    lay_out = PROTOCOLS[evaluation.protocol]
    block_length = evaluation.block_length or config.training.block_length
    for split, limit in (("valid", evaluation.max_tokens), ("test", evaluation.max_tokens_final)):
        if split not in corpus.splits:  # optional in data passed from Python
            continue
        num_tokens = len(corpus.splits[split])
        lay_out(min(num_tokens, (limit or num_tokens) + 1), evaluation.batch_size, block_length)


def _build_model(
    config: RunConfig, corpus: TokenizedCorpus | GivenTokens, device: torch.device
) -> LanguageModel:
    try:
        return build_run(config, corpus.tokenizer.vocabulary_size).to(device)
    except (RuntimeError, MemoryError) as problem:
        if not is_out_of_memory(problem):
            raise
        raise UserError(f"the model of {config.name} does not fit into memory: make it smaller") from None


def _check_interface(model: LanguageModel, device: torch.device) -> None:
    """A user's code may return other shapes or states than it should: say so before the first step."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            check_model(model, rules=["shapes", "stored once"])
        except ContractError as problem:
            raise UserError(f"{problem} longspan.testing.check_model checks every rule.") from None


def _run(
    folder: RunFolder,
    corpus: TokenizedCorpus | GivenTokens,
    model: LanguageModel,
    log: RunLog,
    resume_from: Checkpoint | None,
    strategy: type[Strategy],
    callback: Callback | None,
    asked: TrainingConfig,
) -> None:
    if distributed.is_first():
        log.open(folder.log)
    log.say(_summary(folder, corpus, model, asked))
    if resume_from is None:
        log.note(str(model))
    _seed_rank(folder.config, resume_from.facts["progress"]["step"] if resume_from else 0)
    with within_memory(
        model,
        folder.config,
        log.say,
        ranks=distributed.size(),
        shard=parallel.sharded(folder.config.training),
        resume_command=folder.resume_command,
    ):
        Loop(folder, corpus, model, log, resume_from, strategy, callback).run()
    log.note(f"finished: {json.dumps(folder.final())}")
    if distributed.is_first():
        _write_report(folder, log)


def _write_report(folder: RunFolder, log: RunLog) -> None:
    """The page of the run. The run is complete without it, so whatever fails here is only said."""
    try:
        write_report([folder.path], folder.path / "report.html")
    except Exception as problem:
        log.say(f"warning: there is no report of this run ({problem}); try 'longspan report {folder.path}'")


def _check_unchanged(folder: RunFolder, saved: Checkpoint, source: Path | str) -> None:
    """Raise if `source` changes options in a way that the checkpoint does not allow."""
    last, config, stage = folder.checkpoint("last"), folder.config, saved.facts["progress"]["stage"]
    if stage >= len(config.stage):
        raise UserError(
            f"{last} is from a stage that the configuration no longer has: put its [[stage]] back"
        )
    check_resumable(source, config, stage, saved.facts.get("fixed_options", {}))
    if config.training.average and not saved.below("average"):
        raise UserError(f"{last} holds no average of the weights: remove training.average from config.toml")


def _summary(
    folder: RunFolder, corpus: TokenizedCorpus | GivenTokens, model: LanguageModel, asked: TrainingConfig
) -> str:
    """The first line of a run; `asked` holds the options before `auto` was resolved."""
    config, training = folder.config, folder.config.training
    device = device_name(next(model.parameters()).device)
    precision = f"{training.precision}{' (auto)' if asked.precision == 'auto' else ''}"
    compiled = f"{'' if training.compile else 'not '}compiled{' (auto)' if asked.compile == 'auto' else ''}"
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    flops = model.flops(Shape(training.batch_size, training.block_length))
    pattern = getattr(config.model, "pattern", None)
    train = corpus.splits.get("train")
    read = "blocks to train on from an iterator" if train is None else f"{len(train):,} tokens to train on"
    return (
        f"{config.name}: {num_parameters:,} parameters, {flops / 1e6:,.1f} MFLOPs per token forward"
        f"{f', pattern {pattern}' if pattern else ''}; on {device} in {precision}, {compiled}, "
        f"{read} ({config.data.tokenizer.kind}, "
        f"vocabulary {corpus.tokenizer.vocabulary_size:,}), run folder {folder.path}"
    )


def _log(reporter: Reporter | None) -> RunLog:
    """Rank 0 alone speaks."""
    return RunLog(reporter if reporter is not None and distributed.is_first() else Reporter())


def _seed_rank(config: RunConfig, step: int) -> None:
    """Other random numbers on every rank, for dropout. Rank 0 goes on as one process alone would.

    In a search the ranks must draw the same blocks: there all ranks have the same numbers.
    """
    if distributed.rank() and config.search is None:
        torch.manual_seed(config.training.seed + distributed.rank() * 1_000_003 + step * 7_919)


@contextmanager
def _own_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random generators for a run, and restore the caller's generators afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
