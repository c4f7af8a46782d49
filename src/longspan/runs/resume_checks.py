"""Options that cannot change when a run is resumed, because its checkpoint depends on them."""

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

# Weights and carried state depend on the model, positions in the text on how it is read. The corpus is not
# listed, because a file may move: its fingerprint is compared instead.
_FIXED = (
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
# Nothing in a checkpoint depends on these.
_CHANGEABLE = ("model.*dropout*", "model.weight_drop", "model.*penalty*", "model.*growth")
# These too, but not from or to 0: a penalty that ramps in counts updates in the checkpoint.
_STAYS_ON_OR_OFF = ("model.*penalty_from", "model.*penalty_full")


def fixed_options(config: RunConfig, stage: int) -> dict[str, Any]:
    """The options that cannot change while a run is in its stage number `stage`, by dotted names."""
    tables = {
        "data": {"tokenizer": asdict(config.data.tokenizer)},
        "model": {"architecture": config.architecture} | asdict(config.model),
        "search": asdict(config.search) if config.search else {},
        "training": asdict(config.training),
    }
    options = {
        name: value for name, value in _flat(tables) if is_fixed(name) or _matches(name, _STAYS_ON_OR_OFF)
    }
    options[f"stage.{stage}.optimizer"] = config.stage[stage].optimizer  # its state has one kind
    return options


def check_resumable(source: Path | str, config: RunConfig, stage: int, before: Mapping[str, Any]) -> None:
    """Raise `UserError` for the first option in `source`, a file or a command, that differs from `before`.

    `before` is what `fixed_options` returned when the checkpoint was saved.
    """
    now = fixed_options(config, stage)
    for name, value in before.items():
        if now.get(name) != value and not _may_become(name, value, now.get(name)):
            raise UserError(
                f"{source} has {name} = {shown(now.get(name))}, but the run began with {shown(value)}: "
                "put that back, or start a new run"
            )


def is_fixed(name: str) -> bool:
    """Whether this option decides what weights and carried state mean, or how the text is read."""
    return _matches(name, _FIXED) and not _matches(name, _CHANGEABLE)


def _may_become(name: str, before: Any, now: Any) -> bool:
    """Whether an option that older checkpoints name may change from one value to another."""
    if _matches(name, _STAYS_ON_OR_OFF):
        return bool(before) == bool(now)
    return _matches(name, _CHANGEABLE)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _flat(table: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = dotted(where, key)
        if isinstance(value, Mapping):
            yield from _flat(value, name)
        else:
            yield name, json.loads(json.dumps(value))  # as read from a checkpoint: tuples become lists
