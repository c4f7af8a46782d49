"""Measures how step time depends on spans, and the cost of a single long head.

    python benchmarks/span_cost.py --out FOLDER [--recipe enwik8] [--batch-size 64] [--block-length 512]
                                   [--precision bf16] [--device auto] [--steps 20]

Training steps with optimizer, on the path that training uses (on a GPU compiled), timed by `longspan.bench`:
- with all heads at 16, 64, 256 ... tokens up to the limit;
- without attention: everything else is computed (projections of queries, keys and values, memory,
  feed-forward, head), and each position gets its own value vector;
- with the spans of `longspan bench --spans profile`, but one head of the last layer at half the limit, and at
  the limit.
FOLDER gets span_cost.json and span_cost.png.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from longspan import recipes
from longspan.bench.bench_paths import paths_for
from longspan.bench.machine import seconds_of
from longspan.bench.measure import WARM_UPS
from longspan.bench.spans import learned_spans, set_spans, span_profile
from longspan.bench.training import Training
from longspan.cli.recipes import BYTES, known_vocabulary_size
from longspan.config import RunConfig, schema
from longspan.errors import UserError
from longspan.kernels.span_attention import AttentionContext
from longspan.models import build
from longspan.runs import pick_device
from longspan.runs.environment import environment


def values_pass(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, context: AttentionContext) -> Tensor:
    """Replaces attention: no scores, no sums."""
    return v_BHTK


def without_attention() -> AbstractContextManager[Any]:
    return patch("longspan.layers.attention.span_attention", values_pass)


class Stopwatch:
    """Median seconds of a step with given spans; the model is compiled once."""

    def __init__(self, config: RunConfig, device: torch.device, steps: int) -> None:
        self.config, self.device, self.steps = config, device, steps
        torch.manual_seed(0)
        self.model = build(config.model, known_vocabulary_size(config.data) or BYTES).to(device)
        spans = learned_spans(self.model)
        if not spans:
            raise SystemExit(f"{config.name} has no learned spans: give another --recipe")
        self.num_layers, self.num_heads = len(spans), spans[0].fractions_H().numel()
        self.limit = spans[0].limit
        *_, self.fast = paths_for(self.model, device)
        if config.training.compile:
            self.model.compile()

    def seconds(self, spans_LH: Sequence[Sequence[int]], around: AbstractContextManager[Any]) -> float:
        gc.collect()  # frees graphs captured for other spans
        set_spans(self.model, spans_LH)
        step = Training(self.model, self.config, self.fast).step
        with around:
            times = seconds_of(step, self.device, times=self.steps, warm_ups=WARM_UPS[self.device.type])
        return statistics.median(times)

    def all_heads(self, span: int, around: AbstractContextManager[Any] | None = None) -> float:
        spans_LH = [[span] * self.num_heads] * self.num_layers
        return self.seconds(spans_LH, around or nullcontext())

    def one_head(self, span: int) -> float:
        spans_LH = span_profile(self.num_layers, self.num_heads, self.limit)
        spans_LH[-1][-1] = span
        return self.seconds(spans_LH, nullcontext())


def measure(watch: Stopwatch) -> dict[str, Any]:
    spans = [span for span in (16, 64, 256, 1024, 4096, 16384) if span < watch.limit] + [watch.limit]
    figures: dict[str, Any] = {
        "without_attention": watch.all_heads(min(64, watch.limit), without_attention())
    }
    print(f"without attention: {1e3 * figures['without_attention']:.2f} ms")
    figures["all_heads"] = {}
    for span in spans:
        figures["all_heads"][span] = seconds = watch.all_heads(span)
        times = seconds / figures["without_attention"]
        print(f"all heads at {span}: {1e3 * seconds:.2f} ms, {times:.3f} times as long as without attention")
    half, whole = watch.one_head(watch.limit // 2), watch.one_head(watch.limit)
    figures["one_head"] = {watch.limit // 2: half, watch.limit: whole, "relative_cost": whole / half - 1}
    print(
        f"one head of {watch.num_layers * watch.num_heads} at {watch.limit // 2}: {1e3 * half:.2f} ms, "
        f"at {watch.limit}: {1e3 * whole:.2f} ms, {whole / half - 1:+.2%}"
    )
    return figures


def draw(figures: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.add_subplot()
    milliseconds = {span: 1e3 * seconds for span, seconds in figures["all_heads"].items()}
    axes.plot(*zip(*milliseconds.items(), strict=True), marker="o", label="all heads at this span")
    axes.axhline(1e3 * figures["without_attention"], linestyle="--", color="gray", label="without attention")
    axes.set(xlabel="span in tokens", ylabel="milliseconds per step")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="enwik8")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--block-length", type=int, default=512)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    if (options.out / "span_cost.json").exists():
        parser.error(f"{options.out} has a span_cost.json already")

    try:
        device = pick_device(options.device)
        table = recipes.load(options.recipe)
        table["training"] |= {
            name: getattr(options, name) for name in ("batch_size", "block_length", "precision")
        } | {"micro_batches": 1, "segment_length": None, "compile": device.type == "cuda"}
        config = schema.read(RunConfig, table)
    except UserError as problem:
        parser.error(str(problem))
    watch = Stopwatch(config, device, options.steps)
    figures = measure(watch) | {"options": vars(options) | {"out": str(options.out)}}
    figures["environment"] = environment(device)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "span_cost.json").write_text(json.dumps(figures, indent=2) + "\n")
    draw(figures, options.out / "span_cost.png")


if __name__ == "__main__":
    main()
