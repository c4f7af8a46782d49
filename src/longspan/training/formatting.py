"""Lines of metrics, for JSON and for people."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from longspan.config import StageConfig
from longspan.data import GivenTokens, TokenizedCorpus
from longspan.errors import UserError
from longspan.progress import duration
from longspan.training.loss_meter import LossMeter
from longspan.training.run_progress import RunProgress

_SHOWN = 6  # diagnostics in a printed line; metrics.jsonl has all of them


def scalars(diagnostics: Mapping[str, Tensor], taken: Container[str]) -> dict[str, float | None]:
    """The scalar diagnostics. Names in `taken` are refused. JSON has no NaN: it becomes null."""
    values = {name: torch.as_tensor(value) for name, value in diagnostics.items()}
    found = {name: float(value) for name, value in values.items() if value.ndim == 0}
    for name in found:
        if name in taken:
            raise UserError(
                f"diagnostics() returns {name!r}, a metric of the run itself: choose another name"
            )
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def train_line(
    progress: RunProgress, meter: LossMeter, stage: StageConfig, corpus: TokenizedCorpus | GivenTokens
) -> dict[str, Any]:
    """A line of metrics about the steps since the last one."""
    return {
        "kind": "train",
        "step": progress.step,
        "stage": stage.name,
        "loss": meter.loss,
        **bits_per_byte(meter.loss, corpus),
        "learning_rate": progress.learning_rate,
        "tokens": progress.tokens,
        "seconds": progress.seconds,
        "tokens_per_second": meter.tokens / meter.seconds,
    }


def valid_line(
    progress: RunProgress, stage: StageConfig, figures: Mapping[str, Any], *, best: bool
) -> dict[str, Any]:
    """A line of metrics about an evaluation."""
    begin = {"kind": "valid", "step": progress.step, "stage": stage.name}
    return {**begin, **figures, "best": best, "seconds": progress.seconds}


def bits_per_byte(loss: float, corpus: TokenizedCorpus | GivenTokens) -> dict[str, float]:
    """A loss in nats per token in bits per byte, with the average bytes per token of the training split.

    Empty if only tokens are known, not their text.
    """
    train = corpus.splits.get("train")
    if train is None or train.num_bytes is None or not corpus.tokenizer.knows_text:
        return {}
    return {"bits_per_byte": loss / math.log(2) * (len(train) / train.num_bytes)}


def readable(
    line: Mapping[str, Any],
    diagnostics: Mapping[str, float | None] | None = None,
    *,
    steps: int | None = None,
    seconds_left: float | None = None,
) -> str:
    """A line of training or validation metrics that fits one row of a terminal.

    `steps` are those of the whole run, `seconds_left` is its estimated time.
    """
    step = f"step {line['step']:,}" + (f" of {steps:,}" if steps else "")
    measure = f"loss {line['loss']:.4f}"
    if "bits_per_byte" in line:  # absent if only tokens are known, not their text
        measure += f"  {line['bits_per_byte']:.4f} bits/byte"
    if line["kind"] == "valid":
        best = "  (best so far)" if line["best"] else ""
        if "soft" in line:
            measure += f"  as {line['pattern']} (soft loss {line['soft']['loss']:.4f})"
        return f"{step}  held-out {measure}  over {line['tokens']:,} tokens{best}"
    pattern = [line["pattern"]] if "pattern" in line else []
    parts = [
        step,
        measure,
        f"lr {line['learning_rate']:.3g}",
        f"{line['tokens_per_second']:,.0f} tokens/s",
        *([] if seconds_left is None else [f"{duration(seconds_left)} left"]),
        *pattern,
        *_shown(diagnostics or {}),
    ]
    return "  ".join(parts)


def status(progress: RunProgress, stage: StageConfig, measure: str, seconds_left: float) -> str:
    """What a status line says after every step."""
    speed = f"{progress.tokens / progress.seconds:,.0f} tokens/s"
    left = f"{duration(seconds_left)} of training left"
    return f"{stage.name} step {progress.step:,}  {measure}  {speed}  {left}"


def _shown(diagnostics: Mapping[str, float | None]) -> list[str]:
    """`name 1.5` for each; `name_mean` and `name_max` become `name 1.5 (max 2)`."""
    shown = []
    for name, value in diagnostics.items():
        stem, _, kind = name.rpartition("_")
        if kind == "mean" and f"{stem}_max" in diagnostics:
            shown.append(f"{stem} {_short(value)} (max {_short(diagnostics[f'{stem}_max'])})")
        elif kind != "max" or f"{stem}_mean" not in diagnostics:
            shown.append(f"{name} {_short(value)}")
    return shown if len(shown) <= _SHOWN else [*shown[:_SHOWN], "..."]


def _short(value: float | None) -> str:
    if value is None:
        return "nan"
    return f"{value:.0f}" if 100 <= abs(value) < 1e6 else f"{value:.3g}"


def size(count: int) -> str:
    """Bytes as 1.5 GiB, 150 MiB or 3 KiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            value = count / unit
            return f"{value:,.0f} {name}" if value >= 99.5 else f"{value:.2g} {name}"
    return f"{count} bytes"
