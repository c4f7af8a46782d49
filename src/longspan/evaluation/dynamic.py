"""Dynamic evaluation: the weights follow the text that is scored. Shapes: B lanes, T block.

A block is scored with the weights as they are. Only then a gradient step on this block changes them, and the
next block is scored with the new weights. So every token is scored before any step has seen it. The state is
carried on, without gradients. Learned spans stay as they were trained. The update rules are in
`dynamic_rules.py`.

The model is copied, in float32: its own weights never change.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from longspan.errors import UserError
from longspan.evaluation.dynamic_rules import Rms, Rule, Sgd, Squares
from longspan.evaluation.evaluate import blocks, evaluate
from longspan.evaluation.protocols import PROTOCOLS, EvaluationPlan, Lane

if TYPE_CHECKING:
    from longspan.config import EvaluationConfig
    from longspan.data import TokenArray, TokenFile, Tokenizer
    from longspan.evaluation.score import Score
    from longspan.models.interface import LanguageModel
    from longspan.state import State

RuleName: TypeAlias = Literal["sgd", "rms"]
RATES: dict[RuleName, float] = {"sgd": 0.05, "rms": 1e-4}
DECAYS: dict[RuleName, float] = {"sgd": 0.0, "rms": 1e-3}
STATISTICS_PLACES, STATISTICS_BLOCKS = 8, 32  # blocks in a row at each of the places
STATISTICS_WARM = 4096  # tokens before them, which fill the state


@dataclass(frozen=True)
class DynamicScore:
    """The same tokens with fixed weights, `static`, and with weights that follow the text, `dynamic`."""

    static: Score
    dynamic: Score
    rule: RuleName
    rate: float
    decay: float
    steps: int
    static_seconds: float
    dynamic_seconds: float
    statistics_seconds: float  # for the gradients of the training text, before scoring

    def figures(self) -> dict[str, Any]:
        """JSON values."""
        table = {name: value for name, value in vars(self).items() if name not in ("static", "dynamic")}
        static, dynamic = self.static.figures(), self.dynamic.figures()
        # A rate that is too high gives a score that is not finite: null, where the static one has a number.
        return table | {"static": static, "dynamic": dict.fromkeys(static) | dynamic}


def dynamic_evaluation(
    model: LanguageModel,
    token_file: TokenFile | TokenArray,
    *,
    tokenizer: Tokenizer,
    config: EvaluationConfig,
    block_length: int,
    rule: RuleName = "rms",
    rate: float | None = None,
    decay: float | None = None,
    training: TokenFile | TokenArray | None = None,
    max_tokens: int | None = None,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,
) -> DynamicScore:
    """Score `token_file` twice, as `evaluate` does and with a step after every block.

    The gradient of a step is that of the mean loss over all lanes of the block. Rule `rms` needs tokens of
    the `training` text and reads them first. `progress(done, total)` is called with numbers of tokens that
    were read, of all passes together.
    """
    rate = RATES[rule] if rate is None else rate
    decay = DECAYS[rule] if decay is None else decay
    model = copy.deepcopy(model).float().eval()
    block_length = config.block_length or block_length
    num_tokens = len(token_file) if max_tokens is None else min(len(token_file), max_tokens + 1)
    plan = PROTOCOLS[config.protocol](num_tokens, config.batch_size, block_length)
    weights = _adapted_weights(model)
    parts: list[EvaluationPlan] = []
    if rule == "rms":
        if training is None:
            raise UserError("rule rms needs the training text for its gradients: use rule sgd")
        parts = statistics_plans(len(training), len(plan.lanes), block_length)
    in_training = sum(part.longest * len(part.lanes) for part in parts)
    total = in_training + 2 * plan.tokens

    def tell(done: int) -> None:
        if progress is not None:
            progress(done, total)

    began = time.perf_counter()
    update: Rule = Sgd(weights, rate, decay)
    if training is not None and parts:
        squares = sums_of_squares(model, weights, training.tokens, parts, block_length, device, tell)
        update = Rms(weights, rate, decay, squares.means())
    statistics_seconds = time.perf_counter() - began

    # What runs for the first time takes longer: a block that does not count.
    lanes = tuple(replace(lane, length=min(lane.length, block_length)) for lane in plan.lanes)
    first = [replace(plan, lanes=lanes)]
    sums_of_squares(model, weights, token_file.tokens, first, block_length, device)
    began = time.perf_counter()
    static = evaluate(
        model,
        token_file,
        tokenizer=tokenizer,
        config=config,
        block_length=block_length,
        max_tokens=max_tokens,
        device=device,
        progress=lambda done, _: tell(in_training + done),
    )
    static_seconds = time.perf_counter() - began

    began = time.perf_counter()
    nats, steps = torch.zeros((), dtype=torch.float64, device=device), 0
    for nats_of_block in adapting(model, update, weights, token_file.tokens, plan, block_length, device):
        nats += nats_of_block
        steps += 1
        tell(in_training + plan.tokens + plan.tokens_before(steps * block_length))
    return DynamicScore(
        static=static,
        dynamic=replace(static, nats=float(nats)),
        rule=rule,
        rate=rate,
        decay=decay,
        steps=steps,
        static_seconds=static_seconds,
        dynamic_seconds=time.perf_counter() - began,
        statistics_seconds=statistics_seconds,
    )


def adapting(
    model: LanguageModel,
    rule: Rule,
    weights: list[nn.Parameter],
    tokens: np.ndarray,
    plan: EvaluationPlan,
    block_length: int,
    device: torch.device | str,
) -> Iterator[Tensor]:
    """The nats of every block, each given out before the step on it.

    A block is scored without gradients, as in `evaluate`: some operations round differently with them. Blocks
    in which nothing is scored are only read.
    """
    state = model.initial_state(len(plan.lanes))
    for inputs_BT, targets_BT, counts_BT in blocks(tokens, plan, plan.lanes, block_length):
        block = inputs_BT.to(device), targets_BT.to(device), counts_BT.to(device)
        with torch.no_grad():
            nll_BT, after = _nll(model, block, state)
        yield nll_BT.sum(dtype=torch.float64)
        if scored := int(counts_BT.sum()):
            with torch.enable_grad():
                nll_BT, _ = _nll(model, block, state)
            rule.step(torch.autograd.grad(nll_BT.sum() / scored, weights, materialize_grads=True))
            model.refresh()
        state = after


def _nll(model: LanguageModel, block: tuple[Tensor, Tensor, Tensor], state: State) -> tuple[Tensor, State]:
    """Nats of the targets that count, 0 elsewhere, and the state after the block."""
    inputs_BT, targets_BT, counts_BT = block
    hidden_BTD, state = model(inputs_BT, state)
    return torch.where(counts_BT, model.head.nll(hidden_BTD, targets_BT), 0.0), state


def sums_of_squares(
    model: LanguageModel,
    weights: list[nn.Parameter],
    tokens: np.ndarray,
    parts: list[EvaluationPlan],
    block_length: int,
    device: torch.device | str,
    tell: Callable[[int], None] = lambda done: None,
) -> Squares:
    """The squared gradients of all blocks of `parts`; `tell` is called with the number of tokens read."""
    squares, done = Squares(weights), 0
    for part in parts:
        for _ in adapting(model, squares, weights, tokens, part, block_length, device):
            done += block_length * len(part.lanes)
            tell(done)
    return squares


def statistics_plans(num_tokens: int, lanes: int, block_length: int) -> list[EvaluationPlan]:
    """Where the gradients of the training text are taken: blocks in a row, at places far apart.

    A place has as many lanes as the evaluation. Tokens before these blocks fill the state: what lies far back
    has gradients only then. A short text has fewer places, blocks and tokens before them.
    """
    most = (num_tokens - 1) // lanes // block_length * block_length
    if most < 2 * block_length:
        raise UserError(
            f"{num_tokens:,} tokens of training text are too few for {lanes} lanes of blocks of "
            f"{block_length}: give fewer lanes (batch size) or shorter blocks"
        )
    warm = -(-STATISTICS_WARM // block_length) * block_length
    length = min(most, warm + STATISTICS_BLOCKS * block_length)
    warm = min(warm, length // 2 // block_length * block_length)
    places = min(STATISTICS_PLACES, (num_tokens - 1) // lanes // length)
    starts = np.linspace(0, num_tokens - 1 - length, places * lanes).astype(int).tolist()
    return [
        EvaluationPlan(tuple(Lane(start, length, warm) for start in starts[place::places]), 1, "")
        for place in range(places)
    ]


def _adapted_weights(model: LanguageModel) -> list[nn.Parameter]:
    """All parameters that were trained, except spans: windows stay those of the trained model."""
    spans = {id(parameter) for parameter in model.optimizer_groups().get("span", [])}
    return [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in spans]
