"""Starting a run, and going on with one that was stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from longspan.config import RunConfig, TrainingConfig
from longspan.data import GivenTokens, LanePosition, TokenizedCorpus, check_fits, corpora, prepare
from longspan.errors import UserError, is_out_of_memory
from longspan.evaluation.protocols import PROTOCOLS
from longspan.flops import Shape
from longspan.models import LanguageModel, build_run
from longspan.runs import Checkpoint, RunFolder, checkpoint, lock, pick_device
from longspan.runs.auto_options import resolved
from longspan.runs.check_weights import check_weights
from longspan.runs.environment import device_name, differences, environment
from longspan.runs.resume_checks import check_resumable
from longspan.training.loop import Loop
from longspan.training.reporter import Reporter
from longspan.training.run_progress import RunProgress
from longspan.training.strategy import Strategy

Callback = Callable[[dict[str, Any]], object]


def train(
    config: RunConfig,
    out: Path,
    *,
    given: GivenTokens | None = None,
    reporter: Reporter | None = None,
    strategy: type[Strategy] = Strategy,
    callback: Callback | None = None,
) -> RunFolder:
    """Train what `config` describes into the new folder `out`, on its corpus or on the tokens `given`.

    `callback` gets every line of training and validation metrics; if it returns False the run is saved and
    `Stopped` is raised. At the end the weights with the best validation loss are scored on the validation and
    test splits. SIGINT and SIGTERM save the run and raise `Interrupted`; losses that are not
    finite raise `Diverged`.
    """
    RunFolder.must_be_new(out)
    strategy.check(config)
    if not config.stage:
        raise UserError("there is nothing to train: the configuration has no [[stage]]")
    device = pick_device(config.training.device)  # a wrong name shows now, not after minutes of preparing
    asked, config = config.training, resolved(config, device)
    with reporter or Reporter() as reporter:
        corpus = given or prepare(config.data, progress=reporter.say)
        _check_fits(config, corpus)
        _check_can_be_scored(config, corpus)
        if given is not None and given.blocks is not None and given.blocks.next(LanePosition()) is None:
            raise UserError("there is nothing to train on: data['train'] gives no block")
        with _own_random_numbers(config.training.seed, device):
            model = _built(config, corpus, device)  # before the folder: one that cannot be built leaves none
            folder = RunFolder.create(out, _anchored(config), corpus.tokenizer, corpus.fingerprint)
            with lock.for_training(folder):
                _run(folder, corpus, model, reporter, None, strategy, callback, asked)
    return folder


def resume(
    run: Path,
    *,
    given: GivenTokens | None = None,
    reporter: Reporter | None = None,
    strategy: type[Strategy] = Strategy,
    callback: Callback | None = None,
) -> RunFolder:
    """Go on with a stopped run as if it had not been stopped; one that `is_finished` stays as it is.

    A run that was trained on tokens that a program gave needs the same tokens again.
    """
    folder = RunFolder.open(run)
    strategy.check(folder.config)
    if not folder.config.stage:
        raise UserError(f"there is nothing to go on with: the configuration of {run} has no [[stage]]")
    with reporter or Reporter() as reporter:
        if is_finished(folder):
            reporter.say(f"{run} is finished: nothing to do")
            return folder
        with lock.for_training(folder):
            _go_on(folder, given, reporter, strategy, callback)
    return folder


def is_finished(folder: RunFolder) -> bool:
    """Whether a run has its final score; false again if config.toml has got more steps or stages since."""
    if folder.final() is None or folder.config.training.at_end == "stop":
        return folder.final() is not None
    try:
        facts = checkpoint.load(folder.checkpoint("last")).facts
    except UserError:  # it is lost; the score is there all the same
        return True
    progress = RunProgress.from_json(facts["progress"])
    left = folder.config.stage[progress.stage :]
    return len(left) < 2 and all(map(progress.stage_is_over, left))


def _go_on(
    folder: RunFolder,
    given: GivenTokens | None,
    reporter: Reporter,
    strategy: type[Strategy],
    callback: Callback | None,
) -> None:
    device, saved = pick_device(folder.config.training.device), _saved(folder, reporter)
    folder.config = config = resolved(folder.config, device)  # config.toml was edited if it says auto
    if saved is not None:
        _check_unchanged(folder, saved)
    if given is None and not config.data.corpus:
        raise UserError(
            f"{folder.path} was trained on tokens that a program gave: go on in Python, with "
            f"longspan.resume('{folder.path}', data=...) and the same tokens"
        )
    if given is not None and config.data.corpus:
        raise UserError(f"{folder.path} was trained on the corpus {config.data.corpus}: leave out data")
    corpus = given or prepare(config.data, progress=reporter.say)
    if corpus.fingerprint != folder.fingerprint:
        what = f"the text of {corpus.name} has" if given is None else f"{corpus.name} have"
        raise UserError(f"{what} changed since {folder.path} began: start a new run")
    _check_fits(config, corpus)
    if saved is not None and given is not None and given.blocks is not None and not given.blocks.can_go_back:
        raise UserError(
            f"{folder.path} cannot be resumed from an iterator: give as data['train'] a function that "
            "returns the blocks from a number on"
        )
    changed = differences(folder.environment, environment(device))
    if changed:
        reporter.say(f"{', '.join(changed)}: results may differ in their last bits")
    step = saved.facts["progress"]["step"] if saved else 0
    reporter.say(f"going on with {folder.path} after step {step:,}")
    with _own_random_numbers(config.training.seed, device):
        model = _built(config, corpus, device)
        if saved is not None:
            check_weights(model, saved.below("model"), folder.checkpoint("last"))
        _run(folder, corpus, model, reporter, saved, strategy, callback, config.training)


def _saved(folder: RunFolder, reporter: Reporter) -> Checkpoint | None:
    """Where the run was when it was last saved; nothing if it never was.

    A run may die between its first evaluation and its first regular checkpoint: then its best is all there
    is, and enough, for it holds everything that the last would.
    """
    last, best = folder.checkpoint("last"), folder.checkpoint("best")
    source = last if last.exists() else best
    if not source.exists():
        return None
    saved = checkpoint.load(source)
    if "progress" not in saved.facts:
        raise UserError(f"{source} holds weights but no training to go on with: begin a new run")
    if source == best:
        averaged = ", with the average of the weights in their place" if saved.below("average") else ""
        reporter.say(f"there is no {last}: going on from {best.name}{averaged}")
        checkpoint.save(last, saved.tensors, saved.facts)
    return saved


def _anchored(config: RunConfig) -> RunConfig:
    """The same configuration wherever one stands: a path to the corpus is made absolute."""
    if not config.data.corpus:
        return config
    return replace(config, data=replace(config.data, corpus=corpora.anchored(config.data.corpus)))


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


def _check_can_be_scored(config: RunConfig, corpus: TokenizedCorpus | GivenTokens) -> None:
    """Held-out text that is too short for its protocol comes to light now, not after hours of training."""
    evaluation = config.evaluation
    lay_out = PROTOCOLS[evaluation.protocol]
    block_length = evaluation.block_length or config.training.block_length
    for split, limit in (("valid", evaluation.max_tokens), ("test", evaluation.max_tokens_final)):
        if split not in corpus.splits:  # a program may give no test split
            continue
        num_tokens = len(corpus.splits[split])
        lay_out(min(num_tokens, (limit or num_tokens) + 1), evaluation.batch_size, block_length)


def _built(config: RunConfig, corpus: TokenizedCorpus | GivenTokens, device: torch.device) -> LanguageModel:
    try:
        return build_run(config, corpus.tokenizer.vocabulary_size).to(device)
    except (RuntimeError, MemoryError) as problem:
        if not is_out_of_memory(problem):
            raise
        raise UserError(f"the model of {config.name} does not fit into the memory: make it smaller") from None


def _run(
    folder: RunFolder,
    corpus: TokenizedCorpus | GivenTokens,
    model: LanguageModel,
    reporter: Reporter,
    resume_from: Checkpoint | None,
    strategy: type[Strategy],
    callback: Callback | None,
    asked: TrainingConfig,
) -> None:
    reporter.say(_summary(folder, corpus, model, asked))
    Loop(folder, corpus, model, reporter, resume_from, strategy, callback).run()


def _check_unchanged(folder: RunFolder, saved: Checkpoint) -> None:
    """Somebody may have changed the configuration."""
    last, config, stage = folder.checkpoint("last"), folder.config, saved.facts["progress"]["stage"]
    if stage >= len(config.stage):
        raise UserError(f"{last} is in a later stage than the configuration has: put its [[stage]] back")
    check_resumable(folder.path / "config.toml", config, stage, saved.facts.get("settled", {}))
    if config.training.average and not saved.below("average"):
        raise UserError(f"{last} holds no average of the weights: take training.average out of config.toml")


def _summary(
    folder: RunFolder, corpus: TokenizedCorpus | GivenTokens, model: LanguageModel, asked: TrainingConfig
) -> str:
    """The first line of a run; `asked` are the options before `auto` was resolved."""
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
        f"{corpus.tokenizer.vocabulary_size:,} different ones), run folder {folder.path}"
    )


@contextmanager
def _own_random_numbers(seed: int, device: torch.device) -> Iterator[None]:
    """A run draws the same numbers whatever the program drew before, and leaves no trace after."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
