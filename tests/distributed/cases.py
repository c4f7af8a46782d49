"""Small trainings for one process and for several. As a program it runs some of them under torchrun."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from longspan import distributed
from longspan.config import RunConfig, schema
from longspan.search import Searching
from longspan.training import Stopped, Strategy, resume, train
from tests import forks

SPAN = {"limit": 16, "ramp": 4, "penalty": 1e-3}
SIZES = {"num_layers": 2, "width": 16, "num_heads": 2, "inner_width": 32}
ADAGRAD = {"optimizer": "adagrad", "learning_rate": 0.05, "clip_norm": 0.03, "warmup_steps": 3}
ADAMW = {"optimizer": "adamw", "learning_rate": 0.01, "clip_norm": 0.5, "weight_decay": 0.1}
LAMB = {"optimizer": "lamb", "learning_rate": 0.01, "clip_norm": 0.5}
# Residual scalars have no gradient while blocks add nothing: epsilon is far above its rounding errors.
EPSILON = 1e-5
MUON = {
    "optimizer": "muon",
    "learning_rate": 0.01,
    "epsilon": EPSILON,
    "clip_norm": 0.5,
    "weight_decay": 0.1,
}
NORMUON = {
    "optimizer": "normuon",
    "learning_rate": 0.01,
    "epsilon": EPSILON,
    "weight_decay": 0.1,
    "cautious_decay": True,
    "embedding_learning_rate": 0.02,
    "momentum_warmup_steps": 3,
}

CASES: dict[str, dict[str, Any]] = {
    "adaptive-span": {
        "model": {
            "architecture": "adaptive-span",
            **SIZES,
            "span": SPAN | {"start": 0.8, "growth": [0.25, 0.5, 1.0]},
        },
        "stage": [ADAMW | {"steps": 4, "multi_token": [0.5, 0.25]}, ADAGRAD | {"steps": 5}],
        "training": {"micro_batches": 2},
    },
    "all-attention": {
        "model": {
            "architecture": "all-attention",
            "num_layers": 2,
            "width": 16,
            "num_heads": 2,
            "num_persistent": 5,
            "span": SPAN,
        },
        "stage": [ADAGRAD | {"steps": 8}],
    },
    "transformer-xl": {
        "model": {"architecture": "transformer-xl", **SIZES, "head_width": 5, "memory_length": 12},
        "stage": [LAMB | {"steps": 8}],
        "training": {"segment_length": 36, "average": 0.9},
    },
    "sha-rnn": {
        "model": {
            "architecture": "sha-rnn",
            "num_layers": 2,
            "width": 16,
            "inner_width": 32,
            "memory_length": 24,
        },
        "stage": [LAMB | {"steps": 6}],
        "training": {"block_jitter": True, "accumulate": 2},
    },
    "gpt": {
        "model": {"architecture": "gpt", **SIZES, "context": 24},
        "stage": [ADAMW | {"steps": 8}],
        "training": {"activation_checkpointing": True},
    },
    "flagship": {
        "model": {
            "architecture": "modern",
            **SIZES,
            "memory": "keys-values",
            "ngrams": [2, 3],
            "ngram_rows": 64,
            "ngram_width": 8,
            "rope_fraction": 0.5,
            "key_offset": True,
            "value_embeddings": True,
            "token_shift": True,
            "residual_scalars": True,
            "softcap": 15.0,
            "tied": True,
            "span": SPAN | {"limit_shortest": 8, "start": 0.5, "growth": [0.5, 1.0], "memory": "full"},
        },
        "stage": [MUON | {"steps": 2}, NORMUON | {"steps": 6, "multi_token": [0.5]}],
        "training": {"micro_batches": 2},
    },
    "search": {
        "model": {"architecture": "transformer-xl", **SIZES, "head_width": 5, "memory_length": 12},
        "search": {"num_blocks": 3, "candidates": "sf", "warm_up_steps": 2, "updates": "alternate"},
        "stage": [ADAMW | {"steps": 8}],
    },
}


def configuration(name: str, text: Path, *, shard: bool = False, **training: Any) -> RunConfig:
    """The configuration of a case; no dropout, since every rank draws its own random numbers."""
    case = copy.deepcopy(CASES[name])
    table = {
        "name": name,
        "data": {"corpus": str(text)},
        "model": {"dropout": 0.0} | case["model"],
        "training": {
            "batch_size": 8,
            "block_length": 12,
            "device": "cpu",
            "precision": "float32",
            "compile": False,
            "log_every": 3,
            "evaluate_every": 4,
            "shard": shard,
            "timeout_seconds": 60,
        }
        | case.get("training", {})
        | training,
        "stage": case["stage"],
        "evaluation": {"max_tokens": 200},
    }
    if "search" in case:
        table["search"] = case["search"]
    return schema.read(RunConfig, table)


def run(
    name: str, text: Path, out: Path, *, again: bool = False, stop_at: int | None = None, **options: Any
) -> None:
    """Train a case into a folder, to its end or to a logged step; `again` continues a stopped run."""
    strategy: type[Strategy] = Searching if "search" in CASES[name] else Strategy
    config = configuration(name, text, **options)

    def before_stop(line: dict[str, Any]) -> bool:
        return line["step"] != stop_at

    with suppress(Stopped):
        if again:
            resume(out, config, strategy=strategy, callback=before_stop)
        else:
            train(config, out, strategy=strategy, callback=before_stop)


def launch(processes: int, folder: Path, jobs: list[dict[str, Any]], *, torchruns: bool = False) -> None:
    """Run the jobs, each the arguments of `run`, one after the other in so many processes."""
    work = folder / "jobs.json"
    work.write_text(json.dumps(jobs))
    if not torchruns:
        forks.ranks(processes, main, work)
        return
    words = ["-m", "tests.distributed.cases", str(work)]
    done = torchrun(["--nproc-per-node", str(processes), *words])
    assert done.returncode == 0, done.stderr[-4000:]


def torchrun(words: list[str], timeout: float = 240, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


def main(work: Path) -> None:
    with distributed.joined(torch.device("cpu"), 60):
        for job in json.loads(work.read_bytes()):
            run(job.pop("name"), Path(job.pop("text")), Path(job.pop("out")), **job)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
