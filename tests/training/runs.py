"""A run that is small but has everything in it: two stages, dropout, jitter, wrap-arounds, micro-batches."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import torch

from longspan.config import RunConfig, schema
from longspan.runs import checkpoint
from longspan.training import Reporter

TIMES = {"seconds", "tokens_per_second", "stage_seconds"}


def write_text(folder: Path) -> Path:
    """A few thousand words that a model can learn something about."""
    draw = random.Random(1)
    path = folder / "text.txt"
    words = ["the ", "cat ", "sat ", "on ", "a ", "mat\n", "dog ", "ran\n"]
    path.write_text("".join(draw.choice(words) for _ in range(3000)))
    return path


def small_table(text: Path) -> dict[str, Any]:
    return {
        "name": "small",
        "data": {"corpus": str(text)},
        "model": {
            "architecture": "adaptive-span",
            "num_layers": 1,
            "width": 16,
            "num_heads": 2,
            "inner_width": 32,
            "dropout": 0.1,
            "span": {"limit": 16, "ramp": 4, "penalty": 1e-3},
        },
        "training": {
            "batch_size": 6,
            "block_length": 24,
            "block_jitter": True,
            "micro_batches": 2,
            "device": "cpu",
            "precision": "float32",
            "compile": False,
            "log_every": 7,
            "evaluate_every": 15,
            "checkpoint_every": 10,
        },
        "stage": [
            {"steps": 25, "learning_rate": 0.01, "schedule": "cosine", "clip_norm": 1.0},
            {
                "name": "fine",
                "steps": 18,
                "learning_rate": 0.01,
                "optimizer": "adagrad",
                "clip_norm": 0.03,
                "warmup_steps": 4,
            },
        ],
        "evaluation": {"max_tokens": 300},
    }


def small_config(text: Path, **changes: Any) -> RunConfig:
    """The small run with dotted options changed, written with `__` for the dots."""
    table = small_table(text)
    for name, value in changes.items():
        schema.override(
            table, name.replace("__", "."), value if isinstance(value, str) else json.dumps(value)
        )
    return schema.read(RunConfig, table)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def outcome(run: Path) -> dict[str, Any]:
    """Everything a run leaves behind, byte for byte, except for how long it took."""
    left: dict[str, Any] = {"metrics": [_timeless(line) for line in metrics(run)]}
    left |= {path.name: path.read_text() for path in run.glob("*.jsonl") if path.name != "metrics.jsonl"}
    for which in ("last", "best"):
        saved = checkpoint.load(run / "checkpoints" / f"{which}.safetensors")
        facts = {key: _timeless(value) for key, value in saved.facts.items() if key != "lengths"}
        tensors = {
            name: (str(t.dtype), tuple(t.shape), t.flatten().view(torch.uint8).numpy().tobytes())
            for name, t in saved.tensors.items()
        }
        left[which] = (facts, tensors)
    return left


def _timeless(value: Any) -> Any:
    return {key: v for key, v in value.items() if key not in TIMES} if isinstance(value, dict) else value


class Signals(Reporter):
    """Sends this process a signal when a status line says something."""

    def __init__(self, words: str, number: int) -> None:
        self.words, self.number = words, number

    def status(self, text: str, fraction: float) -> None:
        if self.words in text:
            self.words = "never again"
            signal.raise_signal(self.number)


class Lines(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)
