"""How a model is trained and measured: what all stages share, and the evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from longspan.config.schema import option

Precision: TypeAlias = Literal["auto", "float32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Options that all stages share."""

    batch_size: int = option(64, help="number of lanes: texts read in parallel")
    block_length: int = option(512, help="tokens per step in every lane")
    block_jitter: bool = option(False, help="draw each block's length around block_length, as SHA-RNN does")
    segment_length: int | None = option(
        None,
        help="read the text in segments of this many tokens, in random order, each from an empty memory; a "
        "multiple of block_length (default: every lane reads its part of the text in order)",
        old_name="passage_length",
    )
    at_end: Literal["restart", "stop"] = option(
        "restart",
        help="at the end of the data, start again at a random offset, or end the training, even if steps "
        "or stages are left",
    )
    micro_batches: int = option(1, help="split the batch into this many parts: less memory, same gradients")
    activation_checkpointing: bool = option(
        False,
        help="keep only the input of every block and compute the block again in the backward pass: less "
        "memory, same gradients, about a third more time",
    )
    accumulate: int = option(
        1,
        help="blocks of one update, as in SHA-RNN's code: their losses are added up, and gradients flow "
        "through the state from block to block; updates do not cross the end of an epoch",
    )
    shard: bool = option(
        False,
        help="under torchrun: divide weights, gradients and optimizer state over the processes (FSDP), for "
        "models that do not fit on one GPU",
    )
    timeout_seconds: float = option(
        600.0, help="under torchrun: how long a process waits for the others before the training ends"
    )
    precision: Precision = option(
        "auto",
        help="precision of the forward pass; auto is bf16 on a GPU that has it, else float32; weights, "
        "optimizer and evaluation are always float32",
    )
    compile: Literal["auto"] | bool = option(
        "auto",
        help="torch.compile for all of the model except attention, whose shapes follow the spans; auto "
        "compiles on a GPU, unless block_jitter changes the block length",
    )
    deterministic: bool = option(
        False,
        help="on a GPU: only operations that give the same bits every time, so that a resumed run equals one "
        "that was never stopped; may be slower. A CPU does so anyway",
    )
    compile_warmup: int = option(
        0,
        help="warm-up steps that are rolled back before training, so that its time excludes compilation",
        old_name="rehearsal",
    )
    average: float = option(
        0.0,
        help="evaluate and save a moving average of the weights with this decay per step, such as 0.999 "
        "(0: the weights themselves)",
    )
    device: str = option("auto", help="cpu, cuda, cuda:1 ...; auto uses a GPU if there is one")
    threads: Literal["auto"] | int = option(
        "auto",
        help="CPU threads; auto uses as many as the cores that this process may use (affinity and quota), or "
        "OMP_NUM_THREADS if it is set",
    )
    seed: int = option(1, help="seed of initial weights, dropout, block lengths and the order of segments")
    logger: Literal["wandb"] | None = option(
        None, help="also send the metrics to Weights & Biases (needs: pip install 'longspan[wandb]')"
    )
    log_every: int = option(50, help="steps between two lines of metrics")
    evaluate_every: int = option(1000, help="steps between two evaluations; 0 for none until the end")
    patience: int = option(
        0, help="stop early, after this many evaluations in a row without a better score; 0 for never"
    )
    sample_tokens: int = option(
        0, help="tokens of a sample that every evaluation adds to samples.jsonl, for the report; 0 for none"
    )
    checkpoint_every: int = option(1000, help="steps between two checkpoints; 0 for none by steps")
    checkpoint_minutes: float = option(
        10.0, help="also save a checkpoint when the last one is this many minutes old; 0 for none by time"
    )
    keep_checkpoints: int = option(
        2, help="how many of the last checkpoints are kept; if the newest is damaged, the one before is used"
    )

    def __post_init__(self) -> None:
        if min(self.batch_size, self.block_length, self.log_every) < 1:
            raise ValueError("batch_size, block_length and log_every must be at least 1")
        if self.segment_length is not None:
            if self.segment_length < 1 or self.segment_length % self.block_length:
                raise ValueError(f"segment_length must be a multiple of block_length, {self.block_length}")
            if self.block_jitter:
                raise ValueError("block_jitter cannot be combined with segment_length: leave out one of them")
        if not 1 <= self.micro_batches <= self.batch_size:
            raise ValueError(f"micro_batches must lie between 1 and the batch_size, {self.batch_size}")
        if self.accumulate < 1:
            raise ValueError("accumulate must be at least 1")
        if min(self.evaluate_every, self.checkpoint_every, self.compile_warmup) < 0:
            raise ValueError("evaluate_every, checkpoint_every and compile_warmup must not be negative")
        if self.threads != "auto" and self.threads < 1:
            raise ValueError("threads must be at least 1, or auto")
        if not self.checkpoint_minutes >= 0:
            raise ValueError("checkpoint_minutes must not be negative")
        if not self.timeout_seconds > 0:
            raise ValueError("timeout_seconds must be above 0")
        if self.keep_checkpoints < 1:
            raise ValueError("keep_checkpoints must be at least 1")
        if self.sample_tokens < 0:
            raise ValueError("sample_tokens must not be negative")
        if self.patience < 0:
            raise ValueError("patience must not be negative")
        if self.patience and not self.evaluate_every:
            raise ValueError("patience counts evaluations, and evaluate_every is 0: set evaluate_every too")
        if not 0.0 <= self.average < 1.0:
            raise ValueError("average must be at least 0 and below 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError("seed must lie between 0 and 2^63 - 1")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How held-out text is scored."""

    protocol: Literal["every-token", "adaptive-span", "transformer-xl", "sha-rnn", "fairseq"] = option(
        "every-token", help="which tokens are scored and averaged, and how; the others are the originals'"
    )
    batch_size: int = option(8, help="lanes that the held-out text is split into")
    block_length: int | None = option(None, help="tokens per block (default: as in training)")
    max_tokens: int | None = option(None, help="score at most this many tokens of the validation split")
    max_tokens_final: int | None = option(None, help="score at most this many tokens at the end of training")

    def __post_init__(self) -> None:
        for name in ("batch_size", "block_length", "max_tokens", "max_tokens_final"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1")
