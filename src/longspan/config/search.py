"""How an architecture is searched."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from longspan.config.pattern import check_pattern, letters
from longspan.config.schema import option

COLDEST, HOTTEST = 1e-6, 1e6  # beyond these float32 knows no way from one to the other
_OF_THE_ARCHITECTURE = ("architecture_learning_rate", "architecture_weight_decay")


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """The search of "Pay Attention when Required" (Mandava et al., 2020): every block learns what it is."""

    num_blocks: int = option(6, help="blocks of the stack; each is one of the candidates in the end")
    candidates: str = option(
        "sfi",
        help=lambda: f"what a block can become: {letters('slfi')}, each at most once",
    )
    sampling: Literal["soft", "straight-through"] = option(
        "soft", help="blocks mix their candidates, or pass on one of them and learn as if they had mixed"
    )
    temperature_start: float = option(
        1.0, help="how even the mixture is at first: high is even, 0 is one-hot"
    )
    temperature_end: float = option(0.1, help="the temperature after anneal_steps")
    temperature_schedule: Literal["exponential", "linear", "constant"] = option(
        "exponential", help="the way from temperature_start to temperature_end; constant stays at the start"
    )
    anneal_steps: int | None = option(None, help="steps until temperature_end (default: those of all stages)")
    updates: Literal["together", "alternate"] = option(
        "together", help="one optimizer for weights and architecture, or each its own by turns (the paper)"
    )
    architecture_every: int = option(
        5, help="with updates by turns: every so many steps one moves the architecture and nothing else"
    )
    warm_up_steps: int = option(0, help="with updates by turns: steps before the architecture first moves")
    architecture_learning_rate: float = option(
        1e-2, help="with updates by turns: the constant rate of the architecture's Adam"
    )
    architecture_weight_decay: float = option(
        0.0, help="with updates by turns: decay of the architecture's logits towards an even choice"
    )
    cost_weight: float = option(
        0.0, help="nats per token that the dearest stack costs; the expected cost is added to the loss"
    )
    cost: Literal["flops", "latency"] = option(
        "flops", help="what a candidate costs: its arithmetic, or its time measured on this machine"
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
        for name in ("warm_up_steps", "cost_weight", *_OF_THE_ARCHITECTURE):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative")
        defaults = {field.name: field.default for field in fields(self)}
        for name in ("architecture_every", "warm_up_steps", *_OF_THE_ARCHITECTURE):
            if self.updates == "together" and getattr(self, name) != defaults[name]:
                raise ValueError(f'{name} has no effect without updates = "alternate"')
