"""Scoring held-out text with carried state. Shapes: B lanes, T block.

The processes of torchrun divide the lanes. All of them read equally many blocks, those of the longest lane,
since every block gathers the weights of a sharded model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from longspan import distributed
from longspan.evaluation.by_position import by_position as positions_of
from longspan.evaluation.measure import scored_text, scored_unknown
from longspan.evaluation.protocols import PROTOCOLS, EvaluationPlan, Lane
from longspan.evaluation.score import Score

if TYPE_CHECKING:
    from longspan.config import EvaluationConfig
    from longspan.data import TokenArray, TokenFile, Tokenizer
    from longspan.models.interface import LanguageModel


def evaluate(
    model: LanguageModel,
    token_file: TokenFile | TokenArray,
    *,
    tokenizer: Tokenizer,
    config: EvaluationConfig,
    block_length: int,
    max_tokens: int | None = None,
    memory: bool = True,
    by_position: bool = False,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Score `token_file`, or only its first `max_tokens` predictable tokens.

    `block_length` is used if `config` has none. Without `memory` every block starts from an empty state. With
    `by_position` the score has the loss of every position in a block. `progress(done, total)` is called with
    numbers of tokens. Under torchrun every rank calls this and gets the score of all lanes.
    """
    block_length = config.block_length or block_length
    num_tokens = len(token_file)
    if max_tokens is not None:
        num_tokens = min(num_tokens, max_tokens + 1)
    plan = PROTOCOLS[config.protocol](num_tokens, config.batch_size, block_length)
    length = block_length if by_position else 1
    nats, counts = sum_of_nats(model, token_file.tokens, plan, block_length, length, memory, device, progress)
    positions = positions_of(nats, counts) if by_position else None
    text = scored_text(token_file, tokenizer, plan)
    beyond = len(token_file) - num_tokens
    return Score(
        nats=nats[0] if positions is None else sum(entry.nats for entry in positions),
        tokens=plan.tokens,
        divisor=plan.divisor,
        bytes=text.bytes,
        characters=text.characters,
        words=text.words,
        unknown=scored_unknown(token_file, tokenizer, plan),
        skipped=len(token_file) - plan.tokens,
        skipped_because=plan.skipped_because + (f"; {beyond:,} are beyond the limit" if beyond else ""),
        protocol=config.protocol,
        batch_size=len(plan.lanes),
        block_length=block_length,
        memory=memory,
        by_position=positions,
    )


def sum_of_nats(
    model: LanguageModel,
    tokens: np.ndarray,
    plan: EvaluationPlan,
    block_length: int,
    length: int,
    memory: bool,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None,
) -> tuple[list[float], list[int]]:
    """The nats and numbers of scored tokens, by position in a block of `length`; 1: over all positions."""
    nats_T = torch.zeros(length, dtype=torch.float64, device=device)
    tokens_T = torch.zeros(length, dtype=torch.int64)
    read = 0
    lanes = _own_lanes(plan)
    warm = min(lane.warm for lane in plan.lanes)  # of all ranks: a sharded head gathers its weights
    with torch.no_grad(), evaluating(model):
        state = distributed.initial_state(model, len(lanes))
        for inputs_BT, targets_BT, counts_BT in blocks(tokens, plan, lanes, block_length):
            if not memory:
                state = distributed.initial_state(model, len(lanes))
            hidden_BTD, state = model(inputs_BT.to(device), state)
            read += inputs_BT.shape[1]
            if read > warm:
                nll_BT = model.head.nll(hidden_BTD, targets_BT.to(device))
                nll_BT = torch.where(counts_BT.to(device), nll_BT, 0.0)
                if length == 1:
                    nats_T += nll_BT.sum(dtype=torch.float64)
                    tokens_T += counts_BT.sum()
                else:
                    width = nll_BT.shape[1]
                    nats_T[:width] += nll_BT.sum(dim=0, dtype=torch.float64)
                    tokens_T[:width] += counts_BT.sum(dim=0)
            if progress is not None:
                progress(plan.tokens_before(read), plan.tokens)
    return distributed.summed(nats_T.cpu()).tolist(), distributed.summed(tokens_T).tolist()


def _own_lanes(plan: EvaluationPlan) -> list[Lane]:
    """The lanes of this rank. One that has none reads padding: a single lane cannot be divided."""
    return [plan.lanes[row] for row in distributed.divided(len(plan.lanes))] or [Lane(0, 0)]


def blocks(
    tokens: np.ndarray, plan: EvaluationPlan, lanes: Sequence[Lane], block_length: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Inputs, targets and which of them count; lanes that have ended are padded, without counting."""
    for position in range(0, plan.longest, block_length):
        width = min(block_length, plan.longest - position)
        texts = np.zeros((len(lanes), width + 1), dtype=np.int64)
        counts = np.zeros((len(lanes), width), dtype=bool)
        for row, lane in enumerate(lanes):
            scored = min(width, lane.length - position)
            if scored > 0:
                begin = lane.start + position
                texts[row, : scored + 1] = tokens[begin : begin + scored + 1]
                counts[row, max(0, lane.warm - position) : scored] = True
                if plan.unscored_every is not None:  # as long as a block: the last prediction of each
                    counts[row, plan.unscored_every - 1 :: plan.unscored_every] = False
        texts_BT = torch.from_numpy(texts)
        yield texts_BT[:, :-1].contiguous(), texts_BT[:, 1:].contiguous(), torch.from_numpy(counts)


@contextmanager
def evaluating(model: LanguageModel) -> Iterator[None]:
    """Evaluation mode for every module. Afterwards each has its own mode again, and weights are sharded."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        distributed.reshard(model)
        for module, training in modes:
            module.training = training
