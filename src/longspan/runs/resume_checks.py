"""What a run cannot change once it has begun, for what it has saved would mean something else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from longspan.config import RunConfig
from longspan.config.formatting import dotted, shown
from longspan.errors import UserError

# Weights and carried state belong to a model, places in the text to a way of reading it. The corpus is not
# here, for a file may move: its fingerprint tells whether it is the same.
_SETTLED = (
    "data.tokenizer.*",
    "model.*",
    "search.num_blocks",
    "search.candidates",
    "search.updates",
    "search.cost",
    "training.batch_size",
    "training.segment_length",
    "training.precision",
    "training.seed",
)
_FREE = ("model.*dropout", "model.*penalty*")  # they act on every step anew


def settled(config: RunConfig, stage: int) -> dict[str, Any]:
    """The options that stay as they are while a run is in its stage number `stage`, by dotted names."""
    tables = {
        "data": {"tokenizer": asdict(config.data.tokenizer)},
        "model": {"architecture": config.architecture} | asdict(config.model),
        "search": asdict(config.search) if config.search else {},
        "training": asdict(config.training),
    }
    options = {name: value for name, value in _flat(tables) if _is(name, _SETTLED) and not _is(name, _FREE)}
    options[f"stage.{stage}.optimizer"] = config.stage[stage].optimizer  # its memories are of one kind
    return options


def check_resumable(source: Path, config: RunConfig, stage: int, before: Mapping[str, Any]) -> None:
    """Complain about the first option in the file `source` that is not what `settled` said before."""
    now = settled(config, stage)
    for name, value in before.items():
        if now.get(name) != value:
            raise UserError(
                f"{source} has {name} = {shown(now.get(name))}, but the run began with {shown(value)}: "
                "put that back, or start a new run"
            )


def _is(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _flat(table: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = dotted(where, key)
        if isinstance(value, Mapping):
            yield from _flat(value, name)
        else:
            yield name, json.loads(json.dumps(value))  # as a checkpoint gives it back: tuples are lists
