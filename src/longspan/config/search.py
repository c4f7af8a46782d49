"""Options of the architecture search."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from longspan.config.pattern import check_pattern, letters
from longspan.config.schema import option

COLDEST, HOTTEST = 1e-6, 1e6  # outside this range float32 cannot anneal between them
_OF_THE_ARCHITECTURE = ("architecture_learning_rate", "architecture_weight_decay")


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """The search of "Pay Attention when Required" (Mandava et al., 2020): every block learns its kind."""

    num_blocks: int = option(6, help="blocks of the stack; each ends as one of the candidates")
    candidates: str = option(
        "sfi",
        help=lambda: f"the kinds of blocks to choose from, each at most once: {letters('slfi')}",
    )
    sampling: Literal["soft", "straight-through"] = option(
        "soft",
        help="use the mixture of the candidates, or one of them with the gradient of the mixture",
    )
    temperature_start: float = option(
        1.0, help="temperature at the start: high gives an even mixture, low a one-hot one"
    )
    temperature_end: float = option(
        0.1, help="the temperature after anneal_steps; learned: the lowest temperature"
    )
    temperature_schedule: Literal["exponential", "linear", "constant", "learned"] = option(
        "exponential",
        help="annealing from temperature_start to temperature_end; constant does not anneal; learned: the "
        "temperature is a parameter that starts at temperature_start",
    )
    anneal_steps: int | None = option(None, help="steps until temperature_end (default: all steps)")
    updates: Literal["together", "alternate"] = option(
        "together", help="one optimizer for weights and architecture, or alternating optimizers (the paper)"
    )
    architecture_every: int = option(
        5, help="alternate: every n-th step updates the architecture and nothing else"
    )
    warm_up_steps: int = option(0, help="alternate: steps before the first architecture update")
    architecture_learning_rate: float = option(
        1e-2, help="alternate: constant learning rate of the architecture's Adam"
    )
    architecture_weight_decay: float = option(
        0.0, help="alternate: weight decay of the architecture's logits, towards an even choice"
    )
    cost_weight: float = option(
        0.0, help="expected cost in the loss: nats per token of the most expensive stack"
    )
    cost: Literal["flops", "latency"] = option(
        "flops", help="cost of a candidate: FLOPs, or latency measured on this machine"
    )

    def __post_init__(self) -> None:
        check_pattern(self.candidates, "candidates")
        if len(set(self.candidates)) != len(self.candidates) or len(self.candidates) < 2:
            raise ValueError(f"candidates must be at least two different letters, not '{self.candidates}'")
        counts = [self.num_blocks, self.architecture_every]
        if min(counts if self.anneal_steps is None else [*counts, self.anneal_steps]) < 1:
            raise ValueError("num_blocks, anneal_steps and architecture_every must be at least 1")
        for name in ("temperature_start", "temperature_end"):
            if not COLDEST <= getattr(self, name) <= HOTTEST:
                raise ValueError(f"{name} must be between {COLDEST:g} and {HOTTEST:g}")
        if self.temperature_schedule == "learned":
            if self.temperature_start < self.temperature_end:
                raise ValueError(
                    f"temperature_start, {self.temperature_start:g}, must not be below temperature_end, "
                    f"{self.temperature_end:g}, the lowest learned temperature"
                )
            if self.anneal_steps is not None:
                raise ValueError("anneal_steps has no effect on a learned temperature")
        for name in ("warm_up_steps", "cost_weight", *_OF_THE_ARCHITECTURE):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative")
        defaults = {field.name: field.default for field in fields(self)}
        for name in ("architecture_every", "warm_up_steps", *_OF_THE_ARCHITECTURE):
            if self.updates == "together" and getattr(self, name) != defaults[name]:
                raise ValueError(f'{name} has no effect without updates = "alternate"')
