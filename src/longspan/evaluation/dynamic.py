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
from longspan.evaluation.dynamic_rules import Rms, Rule, Sgd
from longspan.evaluation.evaluate import blocks, evaluate
from longspan.evaluation.protocols import PROTOCOLS, EvaluationPlan

if TYPE_CHECKING:
    from longspan.config import EvaluationConfig
    from longspan.data import TokenArray, TokenFile, Tokenizer
    from longspan.evaluation.score import Score
    from longspan.models.interface import LanguageModel
    from longspan.state import State

RuleName: TypeAlias = Literal["sgd", "rms"]
RATES: dict[RuleName, float] = {"sgd": 0.1, "rms": 1e-4}
DECAYS: dict[RuleName, float] = {"sgd": 0.0, "rms": 1e-3}
STATISTICS_BLOCKS = 256


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
    the `training` text. `progress(done, total)` is called with numbers of tokens, of both passes together.
    """
    rate = RATES[rule] if rate is None else rate
    decay = DECAYS[rule] if decay is None else decay
    model = copy.deepcopy(model).float().eval()
    block_length = config.block_length or block_length
    num_tokens = len(token_file) if max_tokens is None else min(len(token_file), max_tokens + 1)
    plan = PROTOCOLS[config.protocol](num_tokens, config.batch_size, block_length)

    began = time.perf_counter()
    static = evaluate(
        model,
        token_file,
        tokenizer=tokenizer,
        config=config,
        block_length=block_length,
        max_tokens=max_tokens,
        device=device,
        progress=None if progress is None else lambda done, total: progress(done, 2 * total),
    )
    static_seconds = time.perf_counter() - began

    began = time.perf_counter()
    weights = _adapted_weights(model)
    update: Rule = Sgd(weights, rate, decay)
    if rule == "rms":
        if training is None:
            raise UserError("rule rms needs the training text for its gradients: use rule sgd")
        squares = mean_squares(model, weights, training.tokens, len(plan.lanes), block_length, device)
        update = Rms(weights, rate, decay, squares)
    statistics_seconds = time.perf_counter() - began

    began = time.perf_counter()
    nats, steps = torch.zeros((), dtype=torch.float64, device=device), 0
    for nats_of_block in adapting(model, update, weights, token_file.tokens, plan, block_length, device):
        nats += nats_of_block
        steps += 1
        if progress is not None:
            progress(plan.tokens + plan.tokens_before(steps * block_length), 2 * plan.tokens)
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

    A block is scored without gradients, as in `evaluate`: some operations round differently with them.
    """
    state = model.initial_state(len(plan.lanes))
    for inputs_BT, targets_BT, counts_BT in blocks(tokens, plan, plan.lanes, block_length):
        block = inputs_BT.to(device), targets_BT.to(device), counts_BT.to(device)
        with torch.no_grad():
            nll_BT, after = _nll(model, block, state)
        yield nll_BT.sum(dtype=torch.float64)
        with torch.enable_grad():
            nll_BT, _ = _nll(model, block, state)
            mean = nll_BT.sum() / max(1, int(counts_BT.sum()))
        rule.step(torch.autograd.grad(mean, weights, materialize_grads=True))
        model.refresh()
        state = after


def _nll(model: LanguageModel, block: tuple[Tensor, Tensor, Tensor], state: State) -> tuple[Tensor, State]:
    """Nats of the targets that count, 0 elsewhere, and the state after the block."""
    inputs_BT, targets_BT, counts_BT = block
    hidden_BTD, state = model(inputs_BT, state)
    return torch.where(counts_BT, model.head.nll(hidden_BTD, targets_BT), 0.0), state


def mean_squares(
    model: LanguageModel,
    weights: list[nn.Parameter],
    tokens: np.ndarray,
    lanes: int,
    block_length: int,
    device: torch.device | str,
    most: int | None = None,
) -> list[Tensor]:
    """The mean squared gradients of `most` blocks, or fewer, spread evenly over the text.

    A block has as many lanes as in the evaluation, each after one block that fills the state.
    """
    length = 2 * block_length
    rows = min((most or STATISTICS_BLOCKS) * lanes, (len(tokens) - 1) // length)
    if rows < lanes:
        raise UserError(
            f"{len(tokens):,} tokens of training text are too few for {lanes} lanes of blocks of "
            f"{block_length}: give fewer lanes (batch size) or shorter blocks"
        )
    starts = np.linspace(0, len(tokens) - 1 - length, rows).astype(np.int64)
    sums = [torch.zeros_like(weight) for weight in weights]
    count = rows // lanes
    for number in range(count):
        # far apart in the text, as lanes are
        texts = np.stack([tokens[start : start + length + 1] for start in starts[number::count][:lanes]])
        texts_BT = torch.from_numpy(texts.astype(np.int64)).to(device)
        with torch.no_grad():
            _, state = model(texts_BT[:, :block_length], model.initial_state(lanes))
        with torch.enable_grad():
            hidden_BTD, _ = model(texts_BT[:, block_length:length], state.detach())
            mean = model.head.nll(hidden_BTD, texts_BT[:, block_length + 1 :]).mean()
        gradients = torch.autograd.grad(mean, weights, materialize_grads=True)
        torch._foreach_addcmul_(sums, gradients, gradients, value=1 / count)
    return sums


def _adapted_weights(model: LanguageModel) -> list[nn.Parameter]:
    """All parameters that were trained, except spans: windows stay those of the trained model."""
    spans = {id(parameter) for parameter in model.optimizer_groups().get("span", [])}
    return [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in spans]
