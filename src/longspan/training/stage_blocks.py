"""The blocks that a stage trains on."""

from __future__ import annotations

import math
from dataclasses import replace
from types import TracebackType

import torch

from longspan import distributed
from longspan.config import RunConfig, StageConfig
from longspan.data import (
    BlockSource,
    GivenTokens,
    LanePosition,
    Lanes,
    Segments,
    SomeLanes,
    TokenBlock,
    TokenizedCorpus,
)
from longspan.training.prefetch import Prefetcher


class StageBlocks:
    """The blocks of one stage after the other, for the lanes of this rank."""

    _source: BlockSource
    _stage: StageConfig

    def __init__(
        self, corpus: TokenizedCorpus | GivenTokens, config: RunConfig, lanes: range, device: torch.device
    ) -> None:
        self._corpus, self._config, self._lanes = corpus, config, lanes
        longest = max(map(config.block_length, config.stage))
        self.prefetcher = Prefetcher(len(lanes) * longest, device)

    def __enter__(self) -> StageBlocks:
        self.prefetcher.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.prefetcher.__exit__(kind, problem, trace)

    def begin_stage(self, stage: StageConfig) -> None:
        self._stage, self._source = stage, self._source_of(stage)
        self.prefetcher.follow(self._source)

    def of_update(self, position: LanePosition) -> list[TokenBlock]:
        """The blocks of the next update, all of one epoch; none at the end of the text."""
        blocks: list[TokenBlock] = []
        while len(blocks) < self._config.training.accumulate:
            block = self.prefetcher.next(position)
            if block is None or (blocks and block.position.epoch != position.epoch):
                break
            blocks.append(block)
            position = block.position
        return blocks

    def epochs_before(self, block: TokenBlock, whole_epochs: int) -> float:
        """How often the stage has read the text when `block` begins, after so many whole epochs."""
        if self._stage.epochs is None:
            return whole_epochs
        position = block.position
        columns_before = position.offset - block.tokens_BT.shape[1]
        return whole_epochs + columns_before / self._source.epoch_length(position.epoch)

    def with_estimated_steps(self, stage: StageConfig) -> StageConfig:
        """The same stage with its length in steps."""
        if stage.epochs is None:
            return stage
        columns = self._source_of(stage).epoch_length(0)
        per_step = self._config.block_length(stage) * self._config.training.accumulate
        return replace(stage, steps=math.ceil(stage.epochs * columns / per_step), epochs=None)

    def _source_of(self, stage: StageConfig) -> BlockSource:
        corpus, training, lanes = self._corpus, self._config.training, self._lanes
        if isinstance(corpus, GivenTokens) and corpus.blocks is not None:
            return corpus.blocks if distributed.size() == 1 else SomeLanes(corpus.blocks, lanes)
        tokens, sizes = corpus.splits["train"].tokens, (training.batch_size, self._config.block_length(stage))
        at_end, seed = training.at_end, training.seed
        if training.segment_length is not None:
            return Segments(tokens, *sizes, training.segment_length, at_end=at_end, seed=seed, rows=lanes)
        return Lanes(tokens, *sizes, jitter=training.block_jitter, at_end=at_end, seed=seed, rows=lanes)
