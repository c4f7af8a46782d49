"""The weights that a new run starts from: those of another run, or of a checkpoint file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from longspan.config import ModelConfig, SpanConfig, StageConfig, schema
from longspan.data import Tokenizer
from longspan.errors import UserError
from longspan.models import LanguageModel
from longspan.runs import checkpoint
from longspan.runs.folder import RunFolder
from longspan.runs.kept import newest
from longspan.runs.shards import FACTS

FINE_TUNING = StageConfig(
    name="fine-tune", steps=1000, learning_rate=1e-4, schedule="cosine", warmup_steps=100, clip_norm=1.0
)
_NAMED = 3  # tensors of each kind in a message


@dataclass(frozen=True)
class Init:
    """Weights only: the optimizer, the data and the recipe may be others."""

    path: Path  # a run folder or a checkpoint
    partial: bool = False  # take the tensors that fit
    with_tokenizer: bool = True  # take the tokenizer of the run too, so that tokens keep their meaning

    @property
    def run(self) -> RunFolder | None:
        """The run that the weights belong to; None for a file outside of a run folder."""
        if self._is_run:
            return RunFolder.open(self.path)
        folders = [*self.path.absolute().parents][:2]
        return next((RunFolder(folder) for folder in folders if (folder / "config.toml").is_file()), None)

    @property
    def _is_run(self) -> bool:
        """Whether a folder was given that is not itself a checkpoint, which may be a folder of shards."""
        return self.path.is_dir() and not checkpoint.is_folder(self.path)

    @property
    def possible_files(self) -> list[Path]:
        """The file that was given; of a run folder the best checkpoint, else the last."""
        path = self.path.absolute()
        run = RunFolder(path)
        return [path, run.checkpoint("best"), run.checkpoint("last")]

    @property
    def file(self) -> Path:
        """The checkpoint: of a run folder the best, or the last if the run was not yet evaluated."""
        if self._is_run:
            RunFolder.open(self.path)
            found = next((file for file in self.possible_files[1:] if checkpoint.exists(file)), None)
            if found is None:
                raise UserError(f"{self.path} has no weights yet: its folder 'checkpoints' is empty")
            return newest(found)
        if not self.path.exists():
            raise UserError(f"there is no run folder or checkpoint {self.path} to start from")
        if self.path.suffix != checkpoint.SUFFIX:
            raise UserError(
                f"{self.path} is not a checkpoint of longspan: make a run folder of it with 'longspan "
                "import', and start from that"
            )
        return self.path

    def check(self) -> None:
        """Raise `UserError` if there are no weights."""
        _ = self.file

    def recipe(self) -> dict[str, Any]:
        """The table of the run's configuration, without `growth`: its windows have grown already.

        An imported run has no stage and gets `FINE_TUNING`.
        """
        self.check()
        run = self.run
        if run is None:
            raise UserError(
                f"{self.path} is outside of a run folder, so its configuration is unknown: give a recipe"
            )
        config = replace(
            run.config,
            description=f"Starts from the weights of {run.config.name}",
            model=_without_growth(run.config.model),
            stage=run.config.stage or (FINE_TUNING,),
            expected={},
        )
        return schema.write(config)

    def load(self, model: LanguageModel) -> list[str]:
        """Load the weights into `model`; returns what to tell the user."""
        file = self.file
        given = _weights(checkpoint.load(file).below("model"))
        own = _weights(model.state_dict())
        missing = [name for name in own if name not in given]
        extra = [name for name in given if name not in own]
        reshaped = [name for name in own if name in given and own[name].shape != given[name].shape]
        shapes = [f"{name} {_size(given[name])} where the model has {_size(own[name])}" for name in reshaped]
        misfits = [
            *_named(missing, "{} missing"),
            *_named(extra, "{} the model does not have"),
            *_named(shapes, "{} of another shape"),
        ]
        if misfits and not self.partial:
            raise UserError(
                f"{file} does not fit the model: {'; '.join(misfits)}: change the options of the model, or "
                "take what fits with --init-partial"
            )
        taken = {name: given[name] for name in own if name in given and name not in reshaped}
        if not taken:
            raise UserError(f"{file} has nothing that fits the model: {'; '.join(misfits)}")
        model.load_state_dict(taken, strict=False)
        if not misfits:
            return [f"starting from the weights of {file}"]
        return [
            f"starting from {_count(len(taken))} of {file}: {', '.join(list(taken)[:_NAMED])}"
            f"{' ...' if len(taken) > _NAMED else ''}",
            f"not taken from {file}: {'; '.join(misfits)}",
        ]

    def other_tokens(self, tokenizer: Tokenizer) -> str | None:
        """A warning if token numbers have another meaning than in the run that the weights come from."""
        run = self.run
        if run is None:
            return (
                f"{self.path} has no vocabulary with it: token numbers must mean the same as in its training"
            )
        before = run.tokenizer()
        if "number" in (before.form, tokenizer.form) or before.vocabulary_size != tokenizer.vocabulary_size:
            return None  # without a meaning that is known, or the embedding does not fit
        pairs = zip(before.pieces(), tokenizer.pieces(), strict=True)
        changed = sum(old != new for old, new in pairs)
        if not changed:
            return None
        return (
            f"{changed:,} of {tokenizer.vocabulary_size:,} tokens mean something else than in {run.path}: "
            "leave out the tokenizer options to use its vocabulary"
        )

    def facts(self) -> dict[str, Any]:
        """What the run folder records."""
        file = self.file
        with (file / FACTS if file.is_dir() else file).open(
            "rb"
        ) as content:  # it has checksums of all shards
            digest = _sha256(content)
        return {
            "weights": str(file.absolute()),
            "sha256": digest,
            "partial": self.partial,
            "tokenizer": self.with_tokenizer and self.run is not None,
        }


def _without_growth(model: ModelConfig) -> ModelConfig:
    span = getattr(model, "span", None)
    return replace(model, span=replace(span, growth=())) if isinstance(span, SpanConfig) else model


def _sha256(content: Any) -> str:
    digest = hashlib.sha256()
    while chunk := content.read(1 << 22):
        digest.update(chunk)
    return digest.hexdigest()


def _weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without integers: they count updates, for schedules that begin anew."""
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def _named(names: list[str], what: str) -> list[str]:
    """How many there are, with the first few names; nothing if there are none."""
    if not names:
        return []
    more = ", ..." if len(names) > _NAMED else ""
    return [f"{what.format(_count(len(names)))} ({', '.join(names[:_NAMED])}{more})"]


def _count(number: int) -> str:
    return f"{number:,} tensor{'s' * (number != 1)}"


def _size(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"
