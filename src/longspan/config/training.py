"""How a model is trained and measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from longspan.config.formatting import shown
from longspan.config.schema import option

Precision: TypeAlias = Literal["auto", "float32", "bf16", "fp16"]

# Options that only some choices heed; with the others they must stay as they are.
_HEEDED_BY: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "momentum": ("optimizer", ("sgd", "muon")),
    "beta1": ("optimizer", ("adam", "adamw", "lamb", "muon")),
    "beta2": ("optimizer", ("adam", "adamw", "lamb", "muon")),
    "weight_decay": ("optimizer", ("adam", "adamw", "lamb", "sgd", "muon")),
    "min_trust": ("optimizer", ("lamb",)),
    "adamw_learning_rate": ("optimizer", ("muon",)),
    "final_fraction": ("schedule", ("cosine", "trapezoid", "one-minus-sqrt")),
    "cooldown": ("schedule", ("trapezoid", "one-minus-sqrt")),
}


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One stretch of training with one optimizer and one schedule; stages follow each other.

    A stage with the optimizer of the one before goes on with what that has gathered (sums, moments); only the
    learning rate and its schedule begin anew.
    """

    name: str = option("train", help="what the stage is called in logs")
    steps: int = option(help="optimizer steps of this stage")
    optimizer: Literal["adagrad", "adam", "adamw", "lamb", "sgd", "muon"] = option(
        "adamw", help="muon moves the matrices of the blocks and leaves everything else to adamw"
    )
    learning_rate: float = option(help="the highest learning rate of the stage")
    schedule: Literal["constant", "cosine", "inverse-sqrt", "trapezoid", "one-minus-sqrt"] = option(
        "constant",
        help="what the learning rate does after the warm-up; the last two keep it until the cool-down, in "
        "which it falls on a straight line, or as 1 - sqrt",
    )
    warmup_steps: int = option(0, help="linear warm-up: step t uses t/warmup of the rate, t from 1")
    cooldown: float = option(0.4, help="trapezoid, one-minus-sqrt: the last part of the stage, of 1")
    final_fraction: float = option(
        0.0, help="where a rate that falls to the end of the stage ends, as a fraction of the learning rate"
    )
    clip_norm: float = option(
        0.0, help="limit of the gradient norm, 0 for none; over each tensor for adagrad, else over all"
    )
    momentum: float | None = option(None, help="momentum (default: 0.95 for muon, 0 for sgd)")
    beta1: float = option(0.9, help="adam, lamb: decay of the mean gradient")
    beta2: float = option(0.999, help="adam, lamb: decay of the mean squared gradient")
    weight_decay: float = option(0.0, help="decay of matrices; never of norms, biases, embeddings or spans")
    min_trust: float = option(
        0.25,
        help="lamb: the least trust in a step; 0 for none, and then tensors of zeros never move",
    )
    adamw_learning_rate: float | None = option(
        None, help="with muon: the rate of everything muon does not move (default: the same rate)"
    )
    span_learning_rate: float | None = option(
        None, help="the rate of learned spans, in parts of their limit (default: as for other vectors)"
    )
    block_length: int | None = option(
        None, help="tokens read per step in every lane, from where the last stage ended (default: training's)"
    )
    max_seconds: float | None = option(
        None, help="end the stage after this much training time; schedules that end with it run over the time"
    )

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("steps must be at least 1")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise ValueError("max_seconds must be above 0")
        if self.block_length is not None and self.block_length < 1:
            raise ValueError("block_length must be at least 1")
        for name in (
            "learning_rate",
            "adamw_learning_rate",
            "span_learning_rate",
            "warmup_steps",
            "clip_norm",
            "weight_decay",
        ):
            if not (getattr(self, name) or 0) >= 0:
                raise ValueError(f"{name} must not be negative")
        for name in ("momentum", "beta1", "beta2"):
            if not 0.0 <= (getattr(self, name) or 0.0) < 1.0:
                raise ValueError(f"{name} must be at least 0 and below 1")
        if not 0.0 <= self.final_fraction <= 1.0:
            raise ValueError("final_fraction must lie between 0 and 1")
        if not 0.0 < self.cooldown <= 1.0:
            raise ValueError("cooldown must be above 0 and at most 1")
        if not self.min_trust >= 0.0:
            raise ValueError("min_trust must not be negative")
        defaults = {field.name: field.default for field in fields(self)}
        for name, (choice, heeding) in _HEEDED_BY.items():
            chosen = getattr(self, choice)
            if chosen not in heeding and getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name} has no effect with {choice} {chosen} (only with {', '.join(heeding)}): "
                    f"set it to its default, {shown(defaults[name])}"
                )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What every stage shares."""

    batch_size: int = option(64, help="lanes: texts read side by side")
    block_length: int = option(512, help="tokens read per step in every lane")
    block_jitter: bool = option(False, help="draw each block's length around block_length, as SHA-RNN does")
    segment_length: int | None = option(
        None,
        help="read the text in segments of so many tokens in random order, each from an empty memory; a "
        "multiple of block_length (default: every lane reads on to the end of its part)",
        old_name="passage_length",
    )
    at_end: Literal["restart", "stop"] = option(
        "restart",
        help="at the end of the data begin again at a random offset, or end the training there, "
        "whatever steps and stages are left",
    )
    micro_batches: int = option(1, help="run the batch in this many pieces: less memory, same gradients")
    precision: Precision = option(
        "auto",
        help="arithmetic of the forward pass; auto is bf16 on a GPU that has it, else float32; weights, "
        "optimizer and evaluation are always float32",
    )
    compile: Literal["auto"] | bool = option(
        "auto",
        help="compile with torch.compile all of the model but attention, whose shapes follow the spans; auto "
        "compiles on a GPU",
    )
    compile_warmup: int = option(
        0,
        help="steps to run and roll back before training, so that compiling is not counted in its time",
        old_name="rehearsal",
    )
    average: float = option(
        0.0,
        help="evaluate and keep as best a moving average of the weights with this decay per step, such as "
        "0.999 (0: the weights themselves)",
    )
    device: str = option("auto", help="cpu, cuda, cuda:1 ...; auto takes a GPU if there is one")
    seed: int = option(1, help="seed of initial weights, dropout, block lengths and the order of segments")
    log_every: int = option(50, help="steps between two lines of metrics")
    evaluate_every: int = option(1000, help="steps between two evaluations; 0 for none until the end")
    checkpoint_every: int = option(1000, help="steps between two checkpoints; 0 for none until the end")

    def __post_init__(self) -> None:
        if min(self.batch_size, self.block_length, self.log_every) < 1:
            raise ValueError("batch_size, block_length and log_every must be at least 1")
        if self.segment_length is not None:
            if self.segment_length < 1 or self.segment_length % self.block_length:
                raise ValueError(f"segment_length must be a multiple of block_length, {self.block_length}")
            if self.block_jitter:
                raise ValueError("block_jitter is for lanes that read on: leave out segment_length")
        if not 1 <= self.micro_batches <= self.batch_size:
            raise ValueError(f"micro_batches must lie between 1 and the batch_size, {self.batch_size}")
        if min(self.evaluate_every, self.checkpoint_every, self.compile_warmup) < 0:
            raise ValueError("evaluate_every, checkpoint_every and compile_warmup must not be negative")
        if not 0.0 <= self.average < 1.0:
            raise ValueError("average must be at least 0 and below 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError("seed must lie between 0 and 2^63 - 1")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How held-out text is scored."""

    protocol: Literal["every-token", "adaptive-span", "transformer-xl", "sha-rnn"] = option(
        "every-token", help="how tokens are walked and averaged; the others are the originals' ways"
    )
    batch_size: int = option(8, help="lanes the held-out text is cut into")
    block_length: int | None = option(None, help="tokens per block (default: as in training)")
    max_tokens: int | None = option(None, help="score at most this many tokens of the validation split")
    max_tokens_final: int | None = option(None, help="score at most this many tokens at the end of training")

    def __post_init__(self) -> None:
        for name in ("batch_size", "block_length", "max_tokens", "max_tokens_final"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1")
