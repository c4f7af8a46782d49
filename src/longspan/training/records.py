"""What a run writes while it trains: metrics, the records of its modules, events for loggers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from longspan.errors import UserError
from longspan.runs import RunFolder
from longspan.training.board import Board
from longspan.training.journal import Journal
from longspan.training.wandb_logger import WandbLogger

_RESERVED = ("metrics", "config")  # files of the run itself


class Records:
    """The append-only files of a run folder, truncated to their lengths at the checkpoint.

    A file that is not listed in the checkpoint is emptied when its first line is written.
    """

    def __init__(self, folder: RunFolder, lengths: Mapping[str, int] | None = None, step: int = 0) -> None:
        self._folder = folder
        self._journals = {
            name: self._journal(name, length) for name, length in (lengths or {"metrics": 0}).items()
        }
        self._board = Board(folder.tensorboard, step)
        self._wandb = WandbLogger(folder) if folder.config.training.logger == "wandb" else None

    def write(self, line: dict[str, Any]) -> None:
        """Append one line of metrics, which has a `kind` and a `step`."""
        self._journals["metrics"].write(line)
        self._board.write(line["kind"], line, line["step"])
        if self._wandb is not None:
            self._wandb.write(line)

    def write_record(self, name: str, step: int, fields: Mapping[str, Any]) -> None:
        """Append one line to `<name>.jsonl`."""
        _check_name(name)
        if name not in self._journals:
            self._journals[name] = self._journal(name)
        if not isinstance(fields, Mapping) or "step" in fields:
            raise UserError(f"records() must return a dict for {name!r}, without 'step': the run adds it")
        try:
            self._journals[name].write({"step": step, **fields})
        except (TypeError, ValueError) as problem:
            raise UserError(
                f"records() returns a value for {name}.jsonl that is not JSON: {problem}"
            ) from None
        self._board.write_record(name, step, fields)

    def sync(self) -> dict[str, int]:
        """Flush all files to disk and return their lengths."""
        return {name: journal.sync() for name, journal in self._journals.items()}

    def close(self) -> None:
        for journal in self._journals.values():
            journal.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.close()

    def _journal(self, name: str, length: int = 0) -> Journal:
        return Journal(self._folder.path / f"{name}.jsonl", length)


class NoRecords:
    """The records of the ranks that write none."""

    def write(self, line: dict[str, Any]) -> None: ...

    def write_record(self, name: str, step: int, fields: Mapping[str, Any]) -> None: ...

    def sync(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UserError(f"records() returns the name {name!r}: use only letters, digits, '_' and '-'")
    if name in _RESERVED:
        raise UserError(f"records() returns the name {name!r}, a file of the run itself: choose another name")
