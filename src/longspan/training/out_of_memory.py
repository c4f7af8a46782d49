"""What to change if a step needs more memory than there is: one line with numbers instead of a traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from typing import Any

from longspan.config import EvaluationConfig, RunConfig
from longspan.errors import UserError, is_out_of_memory
from longspan.models import LanguageModel, Stack
from longspan.training.activations import Activations
from longspan.training.formatting import size
from longspan.training.memory_plan import MemoryPlan, available_memory, measured_for, memory_plan

_SMALLER = "lower training.batch_size, training.block_length or the size of the model"


@contextmanager
def within_memory(
    model: LanguageModel,
    config: RunConfig,
    say: Callable[[str], None],
    *,
    ranks: int = 1,
    shard: bool = False,
    resume_command: str | None = None,
) -> Iterator[MemoryPlan | None]:
    """Say what a step needs. Inside, running out of memory raises `UserError` with advice in numbers.

    The model is not yet compiled, wrapped or sharded. If not even a few lanes fit, there is no plan.
    """
    if config.training.activation_checkpointing:
        _mention_checkpointing(model, say)
    try:
        activations = measured_for(model, config)
    except (RuntimeError, MemoryError) as problem:
        if not is_out_of_memory(problem):
            raise
        activations = None
    if activations is None:
        yield None
        return
    plan = memory_plan(model, config, activations, ranks=ranks, shard=shard)
    available = available_memory(model)
    say(f"memory for a step: about {plan}{f' on each of {ranks} processes' if ranks > 1 else ''}")
    if available is not None and plan.total > available:
        less = advice(model, config, activations, available, ranks=ranks, shard=shard)
        say(f"that is more than the {size(available)} that are free: {less}")
    try:
        yield plan
        return
    except RuntimeError as problem:  # of torch; a MemoryError comes from something else than a step
        if not is_out_of_memory(problem):
            raise
    # The estimate may be too low: then only what needs clearly less is advised.
    limit = min(available or plan.total, plan.total)
    less = advice(model, config, activations, limit, ranks=ranks, shard=shard)
    there = "" if available is None else f" and {size(available)} were free"
    again = "" if resume_command is None else f"; continue with '{resume_command}' and the changed option"
    raise UserError(f"out of memory: a step needs about {plan}{there}: {less}{again}")


@contextmanager
def within_memory_of_evaluation(config: EvaluationConfig, block_length: int) -> Iterator[None]:
    """Inside, running out of memory raises `UserError` with the options that scoring depends on.

    `block_length` is that of training.
    """
    try:
        yield
        return
    except RuntimeError as problem:
        if not is_out_of_memory(problem):
            raise
    raise UserError(
        f"out of memory while scoring held-out text with {config.batch_size} lanes of "
        f"{config.block_length or block_length} tokens: lower evaluation.batch_size or "
        "evaluation.block_length"
    )


def advice(
    model: LanguageModel,
    config: RunConfig,
    activations: Activations,
    available: int,
    *,
    ranks: int = 1,
    shard: bool = False,
) -> str:
    """Options that need less memory, each with the memory of a step; those that fit, if any do."""
    training = config.training
    needed = memory_plan(model, config, activations, ranks=ranks, shard=shard).total

    def total(options: dict[str, Any]) -> int:
        changed = {name: value for name, value in options.items() if name != "shard"}
        new = replace(config, training=replace(training, **changed))
        return memory_plan(model, new, activations, ranks=ranks, shard=options.get("shard", shard)).total

    def with_micro_batches(options: dict[str, Any]) -> dict[str, Any]:
        """With the fewest micro-batches that fit, else with the most."""
        most = ceil(training.batch_size / ranks)
        numbers = [n for n in _doubled(training.micro_batches, most) if n > training.micro_batches] or [most]
        ways = [{"micro_batches": number, **options} for number in numbers]
        return next((way for way in ways if total(way) <= available), ways[-1])

    alone: list[dict[str, Any]] = []
    if activations.recomputed is not None and not training.activation_checkpointing:
        alone.append({"activation_checkpointing": True})
    if ranks > 1 and not shard:
        alone.append({"shard": True})
    together = {name: value for options in alone for name, value in options.items()}
    ways = [with_micro_batches({}), *alone, with_micro_batches(together)]
    totals = [(way, total(way)) for way in ways]
    totals = [(way, count) for way, count in totals if count < 0.99 * needed]
    fitting = [(way, count) for way, count in totals if count <= available]
    if not totals:
        return _SMALLER
    if not fitting:
        return f"{_listed([min(totals, key=lambda one: one[1])])}, which is still too much: {_SMALLER}"
    return _listed([one for one in fitting if len(one[0]) == 1] or fitting[:1])


def _doubled(number: int, most: int) -> list[int]:
    """`number` doubled again and again, and at the end `most`."""
    numbers = [number]
    while numbers[-1] * 2 < most:
        numbers.append(numbers[-1] * 2)
    return [*numbers, most]


def _listed(ways: list[tuple[dict[str, Any], int]]) -> str:
    (first, count), *more = (
        (" and ".join(f"training.{name} = {str(value).lower()}" for name, value in way.items()), size(total))
        for way, total in ways
    )
    return "; ".join([f"{first} would need about {count}", *(f"{way} {total}" for way, total in more)])


def _mention_checkpointing(model: LanguageModel, say: Callable[[str], None]) -> None:
    if not isinstance(model, Stack):
        kind = type(model).__name__
        say(f"training.activation_checkpointing has no effect: {kind} is not a stack of blocks")
    elif next(model.parameters()).device.type == "cuda":
        say("with training.activation_checkpointing steps are launched, not replayed as CUDA graphs")
