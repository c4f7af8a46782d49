"""Scoring held-out text with carried state. Shapes: B lanes, T block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from longspan.evaluation.measure import scored_text, scored_unknown
from longspan.evaluation.protocols import PROTOCOLS, EvaluationPlan
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
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Score `token_file`, or only its first `max_tokens` predictable tokens.

    `block_length` is used if `config` has none. `progress(done, total)` is called with numbers of tokens.
    """
    block_length = config.block_length or block_length
    num_tokens = len(token_file)
    if max_tokens is not None:
        num_tokens = min(num_tokens, max_tokens + 1)
    plan = PROTOCOLS[config.protocol](num_tokens, config.batch_size, block_length)
    nats = _sum_of_nats(model, token_file.tokens, plan, block_length, device, progress)
    text = scored_text(token_file, tokenizer, plan)
    beyond = len(token_file) - num_tokens
    return Score(
        nats=nats,
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
    )


def _sum_of_nats(
    model: LanguageModel,
    tokens: np.ndarray,
    plan: EvaluationPlan,
    block_length: int,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None,
) -> float:
    nats = torch.zeros((), dtype=torch.float64, device=device)
    done = 0
    with torch.no_grad(), _evaluating(model):
        state = model.initial_state(len(plan.lanes))
        for inputs_BT, targets_BT, counts_BT in _blocks(tokens, plan, block_length):
            hidden_BTD, state = model(inputs_BT.to(device), state)
            nll_BT = model.head.nll(hidden_BTD, targets_BT.to(device))
            nats += torch.where(counts_BT.to(device), nll_BT, 0.0).sum(dtype=torch.float64)
            if progress is not None:
                done += int(counts_BT.sum())
                progress(done, plan.tokens)
    return float(nats)


def _blocks(
    tokens: np.ndarray, plan: EvaluationPlan, block_length: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Inputs, targets and which of them count; lanes that have ended are padded, without counting."""
    longest = max(lane.length for lane in plan.lanes)
    for position in range(0, longest, block_length):
        width = min(block_length, longest - position)
        texts = np.zeros((len(plan.lanes), width + 1), dtype=np.int64)
        counts = np.zeros((len(plan.lanes), width), dtype=bool)
        for row, lane in enumerate(plan.lanes):
            scored = min(width, lane.length - position)
            if scored > 0:
                begin = lane.start + position
                texts[row, : scored + 1] = tokens[begin : begin + scored + 1]
                counts[row, :scored] = True
        texts_BT = torch.from_numpy(texts)
        yield texts_BT[:, :-1].contiguous(), texts_BT[:, 1:].contiguous(), torch.from_numpy(counts)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for every module; each gets its own mode back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
