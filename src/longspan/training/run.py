"""Starts a run, or resumes one that was stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from longspan import distributed
from longspan.config import RunConfig, TrainingConfig
from longspan.data import GivenTokens, TokenizedCorpus, corpora, prepare
from longspan.errors import UserError, is_out_of_memory
from longspan.flops import Shape
from longspan.inspection.report import write_report
from longspan.models import LanguageModel, build_run
from longspan.optim import build_optimizers
from longspan.runs import Checkpoint, RunFolder, lock, pick_device
from longspan.runs.auto_options import resolved
from longspan.runs.environment import device_name, differences, environment
from longspan.runs.init import Init
from longspan.runs.load_weights import check_weights
from longspan.runs.resume_checks import check_resumable, fixed_options
from longspan.training import changed_options, checks, finished, initial_weights, parallel, resume_point
from longspan.training.deterministic import deterministic
from longspan.training.loop import Loop
from longspan.training.out_of_memory import within_memory
from longspan.training.reporter import Reporter
from longspan.training.run_log import RunLog
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
        checks.check_lanes(config.training)
        out = Path(distributed.text_from_first(str(out)))  # the first free name may differ between ranks
        checks.warn_of_long_warmups(config)
        corpus: TokenizedCorpus | GivenTokens
        if given is None:
            config, tokenizer = initial_weights.with_tokenizer(init, config, log)
            corpus = prepare(config.data, log.say, tokenizer)
        else:
            corpus = given
        checks.check_text(config, corpus)
        checks.check_can_be_scored(config, corpus)
        if given is not None and given.blocks is not None:
            checks.check_blocks(given.blocks, config.training)
        with _own_random_numbers(config.training.seed, device):
            # What fails here leaves no folder behind, so that a corrected command can use its name.
            model = _build_model(config, corpus, device)
            started_from = None
            if init is not None:
                started_from = initial_weights.load_first(init, model, config, corpus.tokenizer, log)
            for stage in config.stage:
                build_optimizers(model, stage)
            if config.plugins:
                checks.check_interface(model, device)
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
        checks.check_lanes(training)
        # Rank 0 decides, since the others may read while it changes the folder.
        advice = finished.advice(folder, before) if distributed.is_first() else None
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
        checks.check_unchanged(folder, saved, "the command" if changes else folder.path / "config.toml")
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
    checks.check_text(config, corpus)
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


def _build_model(
    config: RunConfig, corpus: TokenizedCorpus | GivenTokens, device: torch.device
) -> LanguageModel:
    try:
        return build_run(config, corpus.tokenizer.vocabulary_size).to(device)
    except (RuntimeError, MemoryError) as problem:
        if not is_out_of_memory(problem):
            raise
        raise UserError(f"the model of {config.name} does not fit into memory: make it smaller") from None


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
