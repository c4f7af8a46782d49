"""The run folder: configuration, environment, tokenizer, metrics and checkpoints of a run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from longspan.config import RunConfig
from longspan.data import Tokenizer, load_tokenizer
from longspan.errors import UserError
from longspan.files import whole_folder
from longspan.plugins import never_import_from
from longspan.runs import checkpoint
from longspan.runs.environment import environment, pick_device


class RunFolder:
    """The files of a run: configuration, tokenizer, and what training adds (metrics, spans, checkpoints)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        never_import_from(path)  # the folder may come from elsewhere: its files are data only

    @staticmethod
    def create(
        path: Path,
        config: RunConfig,
        tokenizer: Tokenizer,
        fingerprint: str,
        init: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None = None,
    ) -> RunFolder:
        """Create the folder of a new run, atomically; an existing path is an error.

        `fingerprint` is that of the corpus. `init` is for a run that starts from weights of another: where
        they come from, and the tensors of `RunFolder.init`.
        """
        RunFolder.must_be_new(path)
        facts = {
            "environment": environment(pick_device(config.training.device)),
            "corpus": {"name": config.data.corpus, "fingerprint": fingerprint},
        }
        if init is not None:
            facts["init"] = dict(init[0])
        try:
            with whole_folder(path) as partial:
                (partial / "config.toml").write_text(config.to_toml(), encoding="utf-8")
                for name, value in facts.items():
                    text = json.dumps(value, indent=2) + "\n"
                    (partial / f"{name}.json").write_text(text, encoding="utf-8")
                (partial / "checkpoints").mkdir()
                if init is not None:
                    checkpoint.save(RunFolder(partial).init, init[1], {})
                tokenizer.save(partial / "tokenizer")
        except FileExistsError:
            RunFolder.must_be_new(path)  # another process created it in the meantime
            raise
        folder = RunFolder(path)
        folder.config = config  # the object itself instead of the parsed file
        return folder

    @staticmethod
    def create_with_weights(
        path: Path,
        config: RunConfig,
        tokenizer: Tokenizer,
        fingerprint: str,
        weights: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        spans: Mapping[str, Any] | None = None,
    ) -> RunFolder:
        """Create the folder of a model that was trained elsewhere, atomically and with its weights.

        `facts` say where the weights come from; `spans` is the line of learned spans.
        """
        RunFolder.must_be_new(path)
        with whole_folder(path) as partial:
            run = RunFolder.create(partial / "run", config, tokenizer, fingerprint)
            tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
            checkpoint.save(run.checkpoint("best"), tensors, facts)
            if spans is not None:
                run.spans.write_text(json.dumps(spans) + "\n", encoding="utf-8")
            for entry in run.path.iterdir():
                entry.rename(partial / entry.name)
            run.path.rmdir()
        return RunFolder(path)

    @staticmethod
    def must_be_new(path: Path) -> None:
        if path.exists():
            config = path / "config.toml"
            trains = config.is_file() and b"[[stage]]" in config.read_bytes()
            hint = f", or continue with '{RunFolder(path).resume_command}'" if trains else ""
            raise UserError(f"{path} exists already: choose another folder{hint}")

    @staticmethod
    def open(path: Path) -> RunFolder:
        """The run in `path`; raises `UserError` if it is not a run folder."""
        if not path.is_dir():
            raise UserError(f"there is no run folder {path}{': it is a file' if path.exists() else ''}")
        if not (path / "config.toml").is_file():
            raise UserError(f"{path} is not a run folder: it has no config.toml")
        return RunFolder(path)

    @cached_property
    def config(self) -> RunConfig:
        """The configuration of the run, from config.toml."""
        source = self.path / "config.toml"
        return RunConfig.from_toml(source.read_bytes(), str(source))

    @property
    def resume_command(self) -> str:
        """The shell command that continues the run."""
        command = "train" if self.config.search is None else "search"
        return shlex.join(["longspan", command, "--resume", str(self.path)])

    @property
    def environment(self) -> dict[str, Any]:
        """The environment in which the run started."""
        return self._facts("environment")

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the corpus that the run started with."""
        fingerprint: str = self._facts("corpus", "fingerprint")["fingerprint"]
        return fingerprint

    @property
    def started_from(self) -> dict[str, Any] | None:
        """Where the weights before the first step come from; None if they are random."""
        return self._facts("init", "weights", "tokenizer") if (self.path / "init.json").exists() else None

    @property
    def init(self) -> Path:
        """All weights before the first step, in a run that starts from weights of another."""
        return self.path / f"init{checkpoint.SUFFIX}"

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the run was trained with."""
        return load_tokenizer(self.path / "tokenizer")

    @property
    def metrics(self) -> Path:
        """One JSON object per line: the metrics, in order."""
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """What the terminal said, as text."""
        return self.path / "log.txt"

    @property
    def spans(self) -> Path:
        """One JSON object per line: the span of every head at a step."""
        return self.path / "spans.jsonl"

    @property
    def architecture(self) -> Path:
        """One JSON object per line: the probabilities of a search's candidates per block at a step."""
        return self.path / "architecture.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    def final(self) -> dict[str, Any] | None:
        """The last line of metrics, with the scores of the trained model; None until the run is finished."""
        if not self.metrics.is_file():
            return None
        *_, last = [b"{}", *self.metrics.read_bytes().splitlines()]
        try:
            line = json.loads(last)
        except ValueError:  # the writer was killed in the middle of a line
            return None
        return line if isinstance(line, dict) and line.get("kind") == "final" else None

    def checkpoint(self, which: Literal["last", "best"]) -> Path:
        """The newest weights, or those with the best score on the validation split."""
        return self.path / "checkpoints" / f"{which}{checkpoint.SUFFIX}"

    def _facts(self, name: str, *needed: str) -> dict[str, Any]:
        source = self.path / f"{name}.json"
        try:
            facts = json.loads(source.read_bytes())
        except (OSError, ValueError):
            facts = None
        if not isinstance(facts, dict) or not facts.keys() >= {*needed}:
            raise UserError(f"{source} is missing or damaged: put it back, or start a new run")
        return facts
