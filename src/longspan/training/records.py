"""What a run writes down while it trains: metrics, the records of its modules, TensorBoard."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from longspan.errors import UserError
from longspan.runs import RunFolder
from longspan.training.journal import Journal

_NO_CURVES = {"nats", "seconds"}  # sums: they only grow, with the tokens and with the steps
_RESERVED = ("metrics", "config")  # files of the run itself


class Records:
    """The growing files of a run folder, cut back to the lengths that they had at a checkpoint.

    A file that the checkpoint does not know is begun anew when its first line is written.
    """

    def __init__(self, folder: RunFolder, lengths: Mapping[str, int] | None = None, step: int = 0) -> None:
        self._folder = folder
        self._journals = {
            name: self._journal(name, length) for name, length in (lengths or {"metrics": 0}).items()
        }
        # TensorBoard cannot cut its files: it is told to forget what lies beyond the checkpoint.
        self._board = SummaryWriter(str(folder.tensorboard), purge_step=step + 1)

    def write(self, line: dict[str, Any]) -> None:
        """One line of metrics; its `kind` and `step` say what and when."""
        self._journals["metrics"].write(line)
        self._plot(line["kind"], line, line["step"])

    def write_record(self, name: str, step: int, fields: Mapping[str, Any]) -> None:
        """One line of `<name>.jsonl`."""
        _check_name(name)
        if name not in self._journals:
            self._journals[name] = self._journal(name)
        if not isinstance(fields, Mapping) or "step" in fields:
            raise UserError(f"records() must give for {name!r} a dict without 'step', which the run adds")
        try:
            self._journals[name].write({"step": step, **fields})
        except (TypeError, ValueError) as problem:
            raise UserError(f"records() gives for {name}.jsonl what is not JSON: {problem}") from None

    def settle(self) -> dict[str, int]:
        """Put everything on the disk; how long the files are."""
        return {name: journal.settle() for name, journal in self._journals.items()}

    def close(self) -> None:
        for journal in self._journals.values():
            journal.close()
        self._board.close()

    def _journal(self, name: str, length: int = 0) -> Journal:
        return Journal(self._folder.path / f"{name}.jsonl", length)

    def _plot(self, prefix: str, values: dict[str, Any], step: int) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                self._plot(f"{prefix}/{name}", value, step)
            elif isinstance(value, float) and name not in _NO_CURVES:
                self._board.add_scalar(f"{prefix}/{name}", value, step)


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UserError(f"records() gives {name!r}: a name has only letters, digits, '_' and '-'")
    if name in _RESERVED:
        raise UserError(f"records() gives {name!r}, a file of the run itself: choose another name")
