"""What is refused before the first step: text, lanes, models and options that do not go together."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from longspan import distributed
from longspan.config import RunConfig, TrainingConfig
from longspan.data import GivenTokens, LanePosition, TokenizedCorpus, check_fits
from longspan.data.given import BlockStream
from longspan.errors import UserError
from longspan.evaluation.protocols import PROTOCOLS
from longspan.models import LanguageModel
from longspan.runs import Checkpoint, RunFolder
from longspan.runs.resume_checks import check_resumable
from longspan.testing import ContractError, check_model


def warn_of_long_warmups(config: RunConfig) -> None:
    for stage in config.stage:
        if stage.steps is not None and stage.warmup_steps > stage.steps:
            warnings.warn(
                f"the warm-up of stage '{stage.name}' is longer than the stage ({stage.warmup_steps:,} of "
                f"{stage.steps:,} steps): the learning rate never reaches {stage.learning_rate:g}",
                stacklevel=3,
            )


def check_lanes(training: TrainingConfig) -> None:
    """Raise if the batch cannot be divided over the ranks, before anything is written."""
    lanes = len(distributed.share(training.batch_size))
    if training.micro_batches > lanes:
        raise UserError(
            f"training.micro_batches is {training.micro_batches}, but each of {distributed.size()} processes "
            f"has only {lanes} lanes of the batch: lower it, or raise training.batch_size"
        )


def check_text(config: RunConfig, corpus: TokenizedCorpus | GivenTokens) -> None:
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


def check_blocks(blocks: BlockStream, training: TrainingConfig) -> None:
    """Raise if blocks passed from Python are none, or can be read once only and are read twice."""
    if blocks.next(LanePosition()) is None:
        raise UserError("there is nothing to train on: data['train'] has no blocks")
    if training.compile_warmup and not blocks.can_go_back:
        raise UserError(
            "training.compile_warmup reads the first blocks twice, and an iterator gives them once: set it "
            "to 0, or pass as data['train'] a function that returns the blocks from a number on"
        )


def check_can_be_scored(config: RunConfig, corpus: TokenizedCorpus | GivenTokens) -> None:
    """Raise now, not after hours of training, if held-out text is too short for its protocol."""
    evaluation = config.evaluation
    lay_out = PROTOCOLS[evaluation.protocol]
    block_length = evaluation.block_length or config.training.block_length
    for split, limit in (("valid", evaluation.max_tokens), ("test", evaluation.max_tokens_final)):
        if split not in corpus.splits:  # optional in data passed from Python
            continue
        num_tokens = len(corpus.splits[split])
        lay_out(min(num_tokens, (limit or num_tokens) + 1), evaluation.batch_size, block_length)


def check_interface(model: LanguageModel, device: torch.device) -> None:
    """A user's code may return other shapes or states than it should: say so before the first step."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            check_model(model, rules=["shapes"])
        except ContractError as problem:
            raise UserError(f"{problem} longspan.testing.check_model checks every rule.") from None


def check_unchanged(folder: RunFolder, saved: Checkpoint, source: Path | str) -> None:
    """Raise if `source` changes options in a way that the checkpoint does not allow."""
    last, config, stage = folder.checkpoint("last"), folder.config, saved.facts["progress"]["stage"]
    if stage >= len(config.stage):
        raise UserError(
            f"{last} is from a stage that the configuration no longer has: put its [[stage]] back"
        )
    check_resumable(source, config, stage, saved.facts.get("fixed_options", {}))
    if config.training.average and not saved.below("average"):
        raise UserError(f"{last} holds no average of the weights: remove training.average from config.toml")
