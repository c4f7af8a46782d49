"""Sends the metrics of a run to Weights & Biases, if `training.logger` asks for it."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspan.config import schema
from longspan.errors import UserError
from longspan.files import whole_file
from longspan.runs import RunFolder

PROJECT = "longspan"  # unless WANDB_PROJECT is set


class WandbLogger:
    """One run there for a run folder: `wandb_id.txt` has its id, so a resumed run continues it."""

    def __init__(self, folder: RunFolder) -> None:
        wandb = find_wandb()
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=folder.config.name,
                id=_id(folder.path / "wandb_id.txt"),
                resume="allow",
                dir=str(folder.path),
                config=schema.write(folder.config),
            )
        except Exception as problem:  # of many kinds: no network, no login
            reason = str(problem).strip().partition("\n")[0] or type(problem).__name__
            raise UserError(
                f"Weights & Biases does not start: {reason}; run 'wandb login' or set WANDB_MODE=offline, "
                f"then continue with '{folder.resume_command}'"
            ) from None
        # Steps as a metric of its own: a run that was set back to a checkpoint repeats some.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, line: Mapping[str, Any]) -> None:
        """Send a line of metrics, with names such as `train/loss`."""
        self._run.log({"step": line["step"], **_flat(line["kind"], line)})

    def close(self) -> None:
        self._run.finish()


def find_wandb() -> Any:
    """The module, which is imported only if it is used."""
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise UserError(
            "training.logger is wandb, which is not installed: pip install 'longspan[wandb]', or leave it out"
        ) from None


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(f"{prefix}/{name}", value)
        elif isinstance(value, int | float) and name != "step":
            found[f"{prefix}/{name}"] = value
    return found


def _id(path: Path) -> str:
    if not path.is_file():
        with whole_file(path) as partial:
            partial.write_text(f"{secrets.token_hex(8)}\n", encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
