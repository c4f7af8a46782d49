"""Decoding speed on the CPU, compared with the time to read the weights once.

    python benchmarks/decode.py [--threads N] [--batch N] [--rounds N] [--json FILE]

The model is that of recipe enwik8 (38M parameters, float32) with typical learned spans. A step reads one
token of every text and computes the probabilities of the next. The floor is the time to sum every parameter,
tensor by tensor. The lowest floor is the time to sum all of them as one contiguous array. Steps and floors
are timed in turns, and the fastest of each is reported: it is the least disturbed by other work on the
machine. Before that, single steps are checked against reading a block.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from longspan import recipes
from longspan.bench.spans import set_profile
from longspan.config import RunConfig, schema
from longspan.generation import Decoder
from longspan.models import LanguageModel, build
from longspan.runs.environment import environment
from longspan.state import State

VOCABULARY, PROMPT, AGREEMENT = 205, 512, 300


def make_model() -> LanguageModel:
    torch.manual_seed(0)
    model = build(schema.read(RunConfig, recipes.load("enwik8")).model, VOCABULARY).eval()
    set_profile(model, "enwik8")
    return model


def check_agreement(model: LanguageModel, state: State, batch: int) -> float:
    """The largest difference of a log-probability between token by token and one block."""
    tokens_BT = torch.randint(VOCABULARY, (batch, AGREEMENT))
    block_BTV, _ = model.log_probs(tokens_BT, state)
    decoder = Decoder(model, state)
    steps = [decoder.read(token_B1) for token_B1 in tokens_BT.split(1, dim=1)]
    difference = float((torch.stack(steps, dim=1) - block_BTV).abs().max())
    if difference > 1e-4:
        raise SystemExit(f"steps and block differ by {difference}: no speed is reported")
    return difference


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding speed on the CPU")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if min(args.threads, args.batch, args.rounds) < 1:
        parser.error("--threads, --batch and --rounds must be at least 1")
    if args.json and args.json.exists():
        parser.error(f"{args.json} exists already")
    torch.set_num_threads(args.threads)

    model = make_model()
    parameters = list(model.parameters())
    _, state = model(torch.randint(VOCABULARY, (args.batch, PROMPT)), model.initial_state(args.batch))
    difference = check_agreement(model, state, args.batch)
    decoder = Decoder(model, state)
    token_B1 = torch.zeros(args.batch, 1, dtype=torch.long)

    def step() -> None:
        decoder.read(token_B1)

    def read() -> None:
        for parameter in parameters:
            parameter.sum()

    end_to_end = torch.cat([parameter.flatten() for parameter in parameters])
    floor_s = step_s = lowest_s = math.inf
    for _ in range(args.rounds):
        floor_s, step_s = min(floor_s, seconds(read)), min(step_s, seconds(step))
        lowest_s = min(lowest_s, seconds(end_to_end.sum))
    figures: dict[str, object] = {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "threads": args.threads,
        "batch": args.batch,
        "largest_difference": difference,
        "floor_ms": 1e3 * floor_s,
        "step_ms": 1e3 * step_s,
        "ratio": step_s / floor_s,
        "lowest_floor_ms": 1e3 * lowest_s,
        "tokens_per_second": args.batch / step_s,
    }
    print(json.dumps(figures, indent=2))
    if args.json:
        figures["environment"] = environment(torch.device("cpu"))
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
