"""`longspan train --dry-run`: size, memory and time of a training, without starting it."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from longspan.cli.recipes import BYTES, known_vocabulary_size
from longspan.errors import UserError
from longspan.progress import duration, tell

if TYPE_CHECKING:
    from longspan.config import RunConfig

STEPS = 3


def dry_run(config: RunConfig) -> dict[str, Any]:
    """Time a few steps with random tokens. The corpus is not read, and no run folder is made."""
    from longspan.bench import Bench
    from longspan.data.tokenizers import check_settings
    from longspan.runs import pick_device

    if not config.stage:
        raise UserError("there is nothing to train: the configuration has no [[stage]]")
    check_settings(config.data.tokenizer)
    device = pick_device(config.training.device)
    known = known_vocabulary_size(config.data)
    first = replace(config.training, block_length=config.block_length(config.stage[0]))
    bench = Bench(replace(config, training=first), known or BYTES, device, say=tell)
    parameters, (plan, steps) = bench.num_parameters(), bench.time_steps(STEPS)
    training = bench.config.training
    tokens = training.batch_size * training.block_length * training.accumulate
    seconds = steps.median_seconds * training.accumulate
    return {
        "name": config.name,
        "device": str(device),
        "precision": training.precision,
        "parameters": parameters,
        "vocabulary_size": known,
        "memory_bytes": None if plan is None else {**asdict(plan), "total": plan.total},
        "peak_memory_bytes": steps.peak_memory_bytes,
        "tokens_per_step": tokens,
        "seconds_per_step": seconds,
        "steps": _steps(config),
        "estimated_seconds": _estimate(config, seconds),
    }


def as_text(facts: dict[str, Any]) -> str:
    from longspan.training.formatting import size

    guess = "" if facts["vocabulary_size"] else f" (with a vocabulary of {BYTES}: the text decides its size)"
    memory, peak, seconds = facts["memory_bytes"], facts["peak_memory_bytes"], facts["estimated_seconds"]
    estimate = "unknown" if memory is None else f"about {size(memory['total'])}"
    measured = "" if peak is None else f"; measured here: {size(peak)}"
    return "\n".join(
        [
            f"model          {facts['parameters']:,} parameters{guess}",
            f"device         {facts['device']} in {facts['precision']}",
            f"memory         {estimate} for a step{measured}",
            f"step           {facts['tokens_per_step']:,} tokens in {facts['seconds_per_step']:.3f} s",
            f"steps          {_shown_steps(facts)}",
            f"training time  {'unknown' if seconds is None else f'about {duration(seconds)}'}, without "
            "preparing the text and evaluation",
            "nothing was trained or written: leave out --dry-run to start",
        ]
    )


def _shown_steps(facts: dict[str, Any]) -> str:
    most, seconds = facts["steps"], facts["estimated_seconds"]
    if most is None:
        return "unknown: its length is in epochs"
    in_time = math.ceil(seconds / facts["seconds_per_step"])
    return f"{most:,}" if in_time >= most else f"about {in_time:,} (the time is limited), at most {most:,}"


def _steps(config: RunConfig) -> int | None:
    if any(stage.steps is None for stage in config.stage):
        return None
    return sum(stage.steps or 0 for stage in config.stage)


def _estimate(config: RunConfig, seconds: float) -> float | None:
    """A stage ends after its steps or its time, whichever comes first. The first's steps take `seconds`."""
    total, first = 0.0, config.block_length(config.stage[0])
    for stage in config.stage:
        per_step = seconds * config.block_length(stage) / first
        ends = [stage.max_seconds] if stage.max_seconds else []
        ends += [stage.steps * per_step] if stage.steps else []
        if not ends:
            return None
        total += min(ends)
    return total
