"""Training speed on the CPU: each head over its own window, compared with all heads padded to the longest.

    python benchmarks/train_cpu.py [--steps N] [--json FILE]

The model is recipe enwik8-small (6.5M parameters) with batch 16 and block 256, in float32. Spans are set to
typical learned values: 8 to 100 tokens, and one long head (200 to 650) in each upper layer. The baseline
computes the same with the original code's sequence of operations: memory and block are projected together by
torch's own linear layers, and heads are padded (`padded.py`). Outputs and gradients of both models are
compared first. Then their steps, with optimizer, are timed in turns, and the medians are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import padded
from longspan import recipes
from longspan.config import RunConfig, schema
from longspan.kernels.span_attention import AttentionContext
from longspan.layers.attention import Attention
from longspan.layers.feed_forward import FeedForward
from longspan.models import LanguageModel, build
from longspan.optim.adagrad import Adagrad
from longspan.runs.environment import environment
from longspan.state import State

BATCH, BLOCK, VOCABULARY = 16, 256, 205


class PaddedAttention(Attention):
    """As in the original code: every head computes the layer's longest window, for all T x (T + W) pairs.

    Shapes: as in longspan.layers.attention, and S keys of memory and block.
    """

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        seen_BSD = torch.cat([state.tensor("memory"), h_BTD], dim=1)
        context = AttentionContext(
            past=(),  # its keys and values are projected together with those of the block
            windows=self.span.windows_for(h_BTD.shape[1]),
            position_keys=self._positions[0].keys_LK,
            spans=self.span.spans_for(h_BTD),
            ramp=self.span.ramp,
            dropout=self.dropout if self.training else 0.0,
        )
        attended_BHTK = padded.span_attention(
            self._heads(F.linear(h_BTD, self.query.weight)),
            self._heads(F.linear(seen_BSD, self.key.weight)),
            self._heads(F.linear(seen_BSD, self.value.weight)),
            context,
        )
        out_BTD = F.linear(attended_BHTK.transpose(1, 2).flatten(2), self.out.weight)
        after = State({"memory": seen_BSD[:, -self.span.memory_length :].detach().clone()})
        return self.norm(h_BTD + out_BTD), after

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (self.num_heads, self.head_width)).transpose(1, 2)


class PlainFeedForward(FeedForward):
    """Linear, relu, linear with torch's own operations."""

    def forward(self, h_BTD: Tensor, state: State) -> tuple[Tensor, State]:
        inner = torch.relu(F.linear(h_BTD, self.expand.weight, self.expand.bias))
        out_BTD = F.linear(
            F.dropout(inner, self.dropout, self.training), self.contract.weight, self.contract.bias
        )
        return self.norm(h_BTD + out_BTD), state


def learned_spans(num_layers: int, num_heads: int) -> list[list[int]]:
    """Tokens per head: short spans over 8 to 100, and one of 200 to 650 in each layer of the upper half."""
    spans = [[8 + (37 * layer + 29 * head) % 93 for head in range(num_heads)] for layer in range(num_layers)]
    upper = num_layers // 2
    for layer in range(upper, num_layers):
        spans[layer][0] = 200 + 450 * (layer - upper) // (num_layers - upper - 1)
    return spans


def make_model(padded: bool) -> LanguageModel:
    table = recipes.load("enwik8-small")
    table["model"]["span"]["softmax_over"] = "layer" if padded else "head"
    config = schema.read(RunConfig, table).model
    torch.manual_seed(0)
    model = build(config, VOCABULARY)
    attention = [module for module in model.modules() if isinstance(module, Attention)]
    with torch.no_grad():
        for module, spans in zip(attention, learned_spans(config.num_layers, config.num_heads), strict=True):
            assert isinstance(module.span.fraction_H, nn.Parameter)
            module.span.fraction_H.copy_(torch.tensor(spans) / config.span.limit)
            if padded:
                module.__class__ = PaddedAttention
    for module in model.modules():
        if padded and isinstance(module, FeedForward):
            module.__class__ = PlainFeedForward
    model.after_update()
    return model


class Training:
    """A model that reads random tokens, with its carried state."""

    def __init__(self, model: LanguageModel, batch: int = BATCH) -> None:
        self.model, self.batch = model, batch
        # With a rate of 0 an update does all its work, but spans stay as they were set.
        self.optimizer = Adagrad(model.parameters(), lr=0.0, clip=0.03)
        self.state: State = model.initial_state(batch)
        self.generator = torch.Generator().manual_seed(1)

    def step(self) -> Tensor:
        tokens = torch.randint(VOCABULARY, (self.batch, BLOCK + 1), generator=self.generator)
        hidden, state = self.model(tokens[:, :-1], self.state)
        loss = self.model.head.nll(hidden, tokens[:, 1:]).mean() + sum(self.model.penalties().values())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.model.after_update()
        self.state = state.detach()
        return loss.detach()


def check_agreement() -> dict[str, float]:
    """The largest difference of any gradient over four blocks, relative to the size of that gradient.

    In float64 the two differ only by the epsilon of the renormalisation. In float32, which is timed, rounding
    sometimes flips a relu.
    """
    return {"float64": _difference(torch.float64, 1e-4), "float32": _difference(torch.float32, 1e-3)}


def _difference(dtype: torch.dtype, allowed: float) -> float:
    ours, theirs = (Training(make_model(padded=way).to(dtype), batch=2) for way in (False, True))
    worst = 0.0
    for _ in range(4):
        torch.testing.assert_close(ours.step(), theirs.step(), rtol=1e-5, atol=1e-5)
        for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            worst = max(worst, ((mine.grad - other.grad).norm() / other.grad.norm()).item())
    assert worst < allowed, f"the two paths disagree in {dtype}: {worst}"
    return worst


def timed(step: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if min(options.steps, options.threads) < 1:
        parser.error("--steps and --threads must be at least 1")
    if options.json and options.json.exists():
        parser.error(f"{options.json} exists already")
    torch.set_num_threads(options.threads)

    difference = check_agreement()
    ours, theirs = Training(make_model(padded=False)), Training(make_model(padded=True))
    for training in (ours, theirs):  # warm up, and fill the memory
        training.step()
        training.step()
    seconds: dict[str, list[float]] = {"own span": [], "padded": []}
    for _ in range(options.steps):
        seconds["own span"].append(timed(ours.step))
        seconds["padded"].append(timed(theirs.step))
    rates = {name: BATCH * BLOCK / statistics.median(times) for name, times in seconds.items()}
    figures = {
        "parameters": sum(parameter.numel() for parameter in ours.model.parameters()),
        "largest_relative_gradient_difference": difference,
        "tokens_per_second": {name: round(rate) for name, rate in rates.items()},
        "ratio": round(rates["own span"] / rates["padded"], 2),
        "seconds_per_step": {name: [round(t, 4) for t in times] for name, times in seconds.items()},
        "environment": environment(torch.device("cpu")),
    }
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
