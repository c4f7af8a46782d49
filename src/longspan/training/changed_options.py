"""A run that is resumed with the options of a new command instead of those in its config.toml."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from longspan.config import RunConfig, schema
from longspan.config.formatting import dotted, shown
from longspan.data import corpora
from longspan.errors import UserError
from longspan.files import whole_file
from longspan.runs import RunFolder
from longspan.runs.init import Init


def with_options(folder: RunFolder, config: RunConfig, init: Init | None) -> RunConfig:
    """The configuration of a command, completed with what was decided when the run began."""
    before, started_from = folder.config, folder.started_from
    if init is not None:
        _check_same_init(folder, init)
    training = config.training
    if training.precision == "auto":
        training = replace(training, precision=before.training.precision)
    if training.compile == "auto":
        training = replace(training, compile=before.training.compile)
    data = config.data
    if data.corpus:  # else it is trained on tokens passed from Python
        data = replace(data, corpus=corpora.anchored(data.corpus))
    if started_from is not None and started_from["tokenizer"] and (init is None or init.with_tokenizer):
        data = replace(data, tokenizer=before.data.tokenizer)
    return replace(config, data=data, training=training)


def _check_same_init(folder: RunFolder, init: Init) -> None:
    """Another run may have gone on since, so its path is compared and not its weights."""
    started_from = folder.started_from
    if started_from is None:
        raise UserError(f"{folder.path} did not start from {init.path}: leave out --init, or start a new run")
    if started_from["weights"] not in (str(path) for path in init.possible_files):
        raise UserError(
            f"{folder.path} started from {started_from['weights']}, not from {init.path}: put that back, or "
            "start a new run"
        )


def differences(before: RunConfig, now: RunConfig) -> list[str]:
    """The options that differ, such as `stage.0.steps 20 -> 40`."""
    old, new = dict(_flat(schema.write(before))), dict(_flat(schema.write(now)))
    return [
        f"{name} {shown(old.get(name))} -> {shown(new.get(name))}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def store(folder: RunFolder) -> None:
    """Write the configuration to config.toml."""
    with whole_file(folder.path / "config.toml") as partial:
        partial.write_text(folder.config.to_toml(), encoding="utf-8")


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _flat(entry, dotted(name, key))
    elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        for number, entry in enumerate(value):
            yield from _flat(entry, dotted(name, str(number)))
    else:
        yield name, value
