"""Training speed on the CPU: each head pays for its own span, against all heads padded to the longest.

    python benchmarks/train_cpu.py [--steps N] [--json FILE]

The shape is recipe enwik8-small (6.5M parameters) with batch 16 and block 256, in float32. Spans are set to
what such models learn: 8 to 100 tokens, and one long head (200 to 650) in each upper layer. The baseline
does the same mathematics the way the original code does it (`kernels/span_attention/padded.py`). Both first
have to agree on outputs and gradients; then their steps are timed in turns, optimizer included, and the
medians are compared. `longspan bench` does the same for any recipe, one path after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from longspan import recipes
from longspan.bench.agreement import check_agreement
from longspan.bench.machine import seconds_of
from longspan.bench.spans import set_spans
from longspan.bench.training import Training
from longspan.bench.ways import Way
from longspan.config import RunConfig, schema
from longspan.models import LanguageModel, build
from longspan.runs.environment import environment

CPU = torch.device("cpu")
VOCABULARY = 205
OWN_SPAN = Way("fast", "own span")
PADDED = Way("reference", "padded", "padded")


def learned_spans(num_layers: int, num_heads: int) -> list[list[int]]:
    """Tokens per head: short ones spread over 8 to 100, one of 200 to 650 in each layer of the upper half."""
    spans = [[8 + (37 * layer + 29 * head) % 93 for head in range(num_heads)] for layer in range(num_layers)]
    upper = num_layers // 2
    for layer in range(upper, num_layers):
        spans[layer][0] = 200 + 450 * (layer - upper) // (num_layers - upper - 1)
    return spans


def configuration() -> RunConfig:
    table = recipes.load("enwik8-small")
    table["training"] |= {"batch_size": 16, "block_length": 256}
    return schema.read(RunConfig, table)


def make_model(config: RunConfig) -> LanguageModel:
    torch.manual_seed(0)
    model = build(config.model, VOCABULARY)
    set_spans(model, learned_spans(config.model.num_layers, config.model.num_heads))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    config = configuration()
    model = make_model(config)
    agreement = check_agreement(
        model, PADDED, OWN_SPAN, precision="float32", block_length=256, name="enwik8-small"
    )
    trainings = [Training(make_model(config), config, way) for way in (OWN_SPAN, PADDED)]
    for training in trainings:  # warm up, and fill the memory
        training.step()
        training.step()
    seconds: dict[str, list[float]] = {training.way.means: [] for training in trainings}
    for _ in range(options.steps):
        for training in trainings:
            seconds[training.way.means] += seconds_of(training.step, CPU, times=1, warm_ups=0)
    tokens = config.training.batch_size * config.training.block_length
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    figures = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "largest_relative_difference": agreement.error,
        "tokens_per_second": {name: round(rate) for name, rate in rates.items()},
        "ratio": round(rates["own span"] / rates["padded"], 2),
        "seconds_per_step": {name: [round(t, 4) for t in times] for name, times in seconds.items()},
        "environment": environment(CPU),
    }
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
