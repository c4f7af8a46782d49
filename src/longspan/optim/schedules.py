"""Schedules over a stage: the learning rate as a fraction of its peak, the momentum, weights of losses."""

from __future__ import annotations

import math

from longspan.config import StageConfig


def fraction(stage: StageConfig, step: int, seconds: float = 0.0, epochs: float = 0.0) -> float:
    """The fraction of the learning rate at update number `step`, counted from 1.

    `seconds` is the training time of the stage so far, `epochs` how often it has read the text. Schedules
    that end with the stage follow its length, in steps or epochs, or the time if the stage has `max_seconds`,
    whichever is further.
    """
    drops = sum(epochs >= number for number in stage.when)
    return stage.when_factor**drops * _undropped(stage, step, seconds, epochs)


def _undropped(stage: StageConfig, step: int, seconds: float, epochs: float) -> float:
    warm = min(1.0, step / stage.warmup_steps) if stage.warmup_steps else 1.0
    if stage.schedule == "cosine":
        return warm * _above(stage.final_fraction, _cosine(done(stage, step - 1, seconds, epochs)))
    if stage.schedule in ("trapezoid", "one-minus-sqrt"):
        cooled = max(0.0, 1.0 - (1.0 - done(stage, step - 1, seconds, epochs)) / stage.cooldown)
        fallen = cooled if stage.schedule == "trapezoid" else math.sqrt(cooled)
        return warm * _above(stage.final_fraction, 1.0 - fallen)
    if stage.schedule == "inverse-sqrt":
        return warm * min(1.0, math.sqrt(max(stage.warmup_steps, 1) / step))
    return warm


def momentum(stage: StageConfig, step: int, seconds: float = 0.0, epochs: float = 0.0) -> float:
    """The momentum at update number `step`, counted from 1.

    It rises linearly from `momentum_start` over the first steps and falls back to it at the end, where the
    stage has these.
    """
    low, high = stage.momentum_start, stage.highest_momentum
    height = min(1.0, step / stage.momentum_warmup_steps) if stage.momentum_warmup_steps else 1.0
    if stage.momentum_cooldown:
        left = 1.0 - done(stage, step - 1, seconds, epochs)
        height = min(height, left / stage.momentum_cooldown)
    return low + (high - low) * height if height < 1.0 else high


def multi_token_weights(
    stage: StageConfig, step: int, seconds: float = 0.0, epochs: float = 0.0
) -> tuple[float, ...]:
    """The weights of `multi_token` at update number `step`, counted from 1; none if they have fallen to 0."""
    if not any(stage.multi_token):
        return ()
    left = 1.0 - done(stage, step - 1, seconds, epochs) / stage.multi_token_until
    return tuple(weight * left for weight in stage.multi_token) if left > 0 else ()


def done(stage: StageConfig, steps: int, seconds: float, epochs: float = 0.0) -> float:
    """The fraction of a stage that is done, by its length or by time, whichever is further; 1 is the end."""
    by_time = seconds / stage.max_seconds if stage.max_seconds else 0.0
    by_length = steps / stage.steps if stage.steps else epochs / (stage.epochs or math.inf)
    return min(1.0, max(by_length, by_time))


def _cosine(done: float) -> float:
    return (1.0 + math.cos(math.pi * done)) / 2.0


def _above(final: float, height: float) -> float:
    """From 1 to `final` as `height` goes from 1 to 0."""
    return final + (1.0 - final) * height
