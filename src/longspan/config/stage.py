"""Options of a stage: one part of a training with one optimizer and one schedule."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from longspan.config.formatting import shown
from longspan.config.schema import option

_MUONS = ("muon", "normuon")

# Options that only some choices use; with the others they must keep their defaults.
_HEEDED_BY: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "momentum": ("optimizer", ("sgd", *_MUONS)),
    "momentum_start": ("optimizer", _MUONS),
    "momentum_warmup_steps": ("optimizer", _MUONS),
    "momentum_cooldown": ("optimizer", _MUONS),
    "beta1": ("optimizer", ("adam", "adamw", "lamb", *_MUONS)),
    "beta2": ("optimizer", ("adam", "adamw", "lamb", *_MUONS)),
    "epsilon": ("optimizer", ("adam", "adamw", *_MUONS)),
    "weight_decay": ("optimizer", ("adam", "adamw", "lamb", "sgd", *_MUONS)),
    "weight_decay_of": ("optimizer", ("adam", "adamw", "lamb", "sgd", *_MUONS)),
    "weight_decay_schedule": ("optimizer", ("adam", "adamw", "lamb", "sgd", *_MUONS)),
    "cautious_decay": ("optimizer", _MUONS),
    "min_trust": ("optimizer", ("lamb",)),
    "adamw_learning_rate": ("optimizer", _MUONS),
    "final_fraction": ("schedule", ("cosine", "trapezoid", "one-minus-sqrt")),
    "cooldown": ("schedule", ("trapezoid", "one-minus-sqrt")),
}
_UNUSED_IF_ZERO = ("momentum",)  # 0 is also no momentum: command lines written for other code may have it


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One part of a training with one optimizer and one schedule. Stages run one after the other.

    A stage with the same optimizer as the one before keeps its state (sums, moments). Only the learning rate
    and its schedule start again.
    """

    name: str = option("train", help="name of the stage in logs")
    steps: int | None = option(None, help="length of this stage in optimizer steps (or give epochs)")
    epochs: int | None = option(
        None, help="length of this stage in epochs: how many times it reads the training text"
    )
    optimizer: Literal["adagrad", "adam", "adamw", "lamb", "sgd", "muon", "normuon"] = option(
        "adamw",
        help="muon and normuon (steps of one size for all neurons) update weights of linear and recurrent "
        "layers outside the output layer, and adamw everything else",
    )
    learning_rate: float = option(help="the highest learning rate of the stage")
    schedule: Literal["constant", "cosine", "inverse-sqrt", "trapezoid", "one-minus-sqrt"] = option(
        "constant",
        help="learning rate after the warm-up; trapezoid and one-minus-sqrt keep it until the cool-down, in "
        "which it falls linearly or as 1 - sqrt",
    )
    warmup_steps: int = option(0, help="linear warm-up: step t = 1, 2, ... uses t / warmup_steps of the rate")
    cooldown: float = option(0.4, help="trapezoid, one-minus-sqrt: the cool-down as a fraction of the stage")
    final_fraction: float = option(
        0.0, help="learning rate at the end of a falling schedule, as a fraction of learning_rate"
    )
    when: tuple[int, ...] = option(
        (), help="after each of these numbers of epochs of the stage, multiply the rate by when_factor"
    )
    when_factor: float = option(0.1, help="factor of the learning rate at the epochs in when")
    clip_norm: float = option(
        0.0, help="limit of the gradient norm, 0 for none; per tensor for adagrad, else over all gradients"
    )
    clip_value: float = option(
        0.0, help="limit of each element of the gradients, before clip_norm; 0 for none"
    )
    momentum: float | None = option(
        None, help="momentum (default: 0.95 for muon and normuon, 0 for sgd); the others accept only 0"
    )
    momentum_start: float = option(
        0.85, help="muon, normuon: momentum at the start of its warm-up and at the end of its cool-down"
    )
    momentum_warmup_steps: int = option(
        0, help="muon, normuon: steps in which momentum rises linearly from momentum_start; 0 for none"
    )
    momentum_cooldown: float = option(
        0.0,
        help="muon, normuon: the last part of the stage, as a fraction of it, in which momentum falls to "
        "momentum_start; 0 for none",
    )
    beta1: float = option(0.9, help="adam, lamb: decay of the mean gradient")
    beta2: float = option(0.999, help="adam, lamb: decay of the mean squared gradient")
    epsilon: float = option(1e-8, help="adam, adamw: added to the root of the mean squared gradient")
    weight_decay: float = option(0.0, help="weight decay of the parameters that weight_decay_of names")
    weight_decay_of: Literal["matrices", "all"] = option(
        "matrices",
        help="what decays: matrices of the layers, or all parameters, also norms, biases, embeddings and "
        "spans, as in SHA-RNN's code",
    )
    weight_decay_schedule: Literal["constant", "learning-rate"] = option(
        "constant",
        help="with learning-rate, weight_decay is also multiplied by the rate's fraction of its peak: a step "
        "then decays by the square of that fraction",
    )
    cautious_decay: bool = option(
        False,
        help="muon, normuon: their matrices decay only where the step also brings a weight nearer to 0",
    )
    min_trust: float = option(
        0.25,
        help="lamb: minimum of the trust ratio; with 0, tensors of zeros never move",
    )
    adamw_learning_rate: float | None = option(
        None, help="with muon or normuon: the learning rate of adamw (default: learning_rate)"
    )
    embedding_learning_rate: float | None = option(
        None, help="learning rate of embeddings, of n-grams too (default: as for vectors)"
    )
    head_learning_rate: float | None = option(
        None, help="learning rate of the output layer, if it is not tied (default: as for vectors)"
    )
    scalar_learning_rate: float | None = option(
        None, help="learning rate of gates and learned scalars (default: as for vectors)"
    )
    span_learning_rate: float | None = option(
        None, help="learning rate of spans, as fractions of their limit (default: as for other vectors)"
    )
    block_length: int | None = option(
        None, help="tokens per step in every lane in this stage (default: training.block_length)"
    )
    multi_token: tuple[float, ...] = option(
        (),
        help="weights of the losses of later tokens, such as [0.5, 0.25]: in training a position also "
        "predicts the second and the third token after it (default: only the next one)",
    )
    multi_token_until: float = option(
        0.67,
        help="the first part of the stage, as a fraction of it, in which the weights of multi_token fall "
        "linearly to 0",
    )
    max_seconds: float | None = option(
        None, help="end the stage after this training time; falling schedules then follow the time"
    )

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                "give the length of a stage as steps or as epochs, not both: 'none' removes one of a recipe"
                if self.steps is not None
                else "give the length of the stage, as steps or as epochs"
            )
        for name in ("steps", "epochs"):
            if (length := getattr(self, name)) is not None and length < 1:
                raise ValueError(f"{name} must be at least 1")
        if any(later <= earlier for earlier, later in itertools.pairwise((0, *self.when))):
            raise ValueError("when must hold numbers of epochs above 0, in increasing order")
        if not self.when_factor > 0:
            raise ValueError("when_factor must be above 0")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError("max_seconds must be above 0")
        if self.block_length is not None and self.block_length < 1:
            raise ValueError("block_length must be at least 1")
        for name in (
            "learning_rate",
            "adamw_learning_rate",
            "embedding_learning_rate",
            "head_learning_rate",
            "scalar_learning_rate",
            "span_learning_rate",
            "warmup_steps",
            "momentum_warmup_steps",
            "clip_norm",
            "clip_value",
            "weight_decay",
        ):
            if not (getattr(self, name) or 0) >= 0:
                raise ValueError(f"{name} must not be negative")
        for name in ("momentum", "momentum_start", "beta1", "beta2"):
            if not 0.0 <= (getattr(self, name) or 0.0) < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1")
        if not 0.0 <= self.final_fraction <= 1.0:
            raise ValueError("final_fraction must lie between 0 and 1")
        if not 0.0 <= self.momentum_cooldown <= 1.0:
            raise ValueError("momentum_cooldown must lie between 0 and 1")
        if not all(weight >= 0 for weight in self.multi_token):
            raise ValueError("the weights of multi_token must not be negative")
        if not 0.0 < self.multi_token_until <= 1.0:
            raise ValueError("multi_token_until must be above 0 and at most 1")
        if not self.epsilon > 0:
            raise ValueError("epsilon must be above 0")
        if not 0.0 < self.cooldown <= 1.0:
            raise ValueError("cooldown must be above 0 and at most 1")
        if not self.min_trust >= 0.0:
            raise ValueError("min_trust must not be negative")
        defaults = {field.name: field.default for field in fields(self)}
        if not any(self.multi_token) and self.multi_token_until != defaults["multi_token_until"]:
            raise ValueError("multi_token_until has no effect without multi_token: leave it out")
        for name, (choice, heeding) in _HEEDED_BY.items():
            chosen, value = getattr(self, choice), getattr(self, name)
            if name in _UNUSED_IF_ZERO and value == 0:
                continue
            if chosen not in heeding and value != defaults[name]:
                raise ValueError(
                    f"{name} has no effect with {choice} {chosen} (only with {', '.join(heeding)}): "
                    f"set it to its default, {shown(defaults[name])}"
                )
        highest = self.highest_momentum
        if (self.momentum_warmup_steps or self.momentum_cooldown) and self.momentum_start > highest:
            raise ValueError(f"momentum_start must not be above momentum, {highest:g}")

    @property
    def highest_momentum(self) -> float:
        """The momentum between its warm-up and its cool-down."""
        if self.momentum is not None:
            return self.momentum
        return 0.95 if self.optimizer in _MUONS else 0.0
