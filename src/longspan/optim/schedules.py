"""The learning rate over a stage, as a fraction of the stage's highest rate."""

from __future__ import annotations

import math

from longspan.config import StageConfig


def fraction(stage: StageConfig, step: int, seconds: float = 0.0) -> float:
    """Which part of the learning rate update number `step` uses, counted from 1.

    `seconds` is the training time the stage has used so far; it matters only to a schedule that ends with the
    stage, if that has a limit of time: it then follows whichever of steps and time is further on.
    """
    warm = min(1.0, step / stage.warmup_steps) if stage.warmup_steps else 1.0
    if stage.schedule == "cosine":
        return warm * _above(stage.final_fraction, _cosine(done(stage, step - 1, seconds)))
    if stage.schedule in ("trapezoid", "one-minus-sqrt"):
        cooled = max(0.0, 1.0 - (1.0 - done(stage, step - 1, seconds)) / stage.cooldown)
        fallen = cooled if stage.schedule == "trapezoid" else math.sqrt(cooled)
        return warm * _above(stage.final_fraction, 1.0 - fallen)
    if stage.schedule == "inverse-sqrt":
        return warm * min(1.0, math.sqrt(max(stage.warmup_steps, 1) / step))
    return warm


def done(stage: StageConfig, steps: int, seconds: float) -> float:
    """The part of a stage that lies behind, by steps or by time, whichever is further on; 1 is its end."""
    by_time = seconds / stage.max_seconds if stage.max_seconds else 0.0
    return min(1.0, max(steps / stage.steps, by_time))


def _cosine(done: float) -> float:
    return (1.0 + math.cos(math.pi * done)) / 2.0


def _above(final: float, height: float) -> float:
    """From 1 to `final` as `height` goes from 1 to 0."""
    return final + (1.0 - final) * height
