"""`longspan.evaluate`: a model on held-out text."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from longspan import distributed
from longspan.config import EvaluationConfig, schema
from longspan.data import TokenArray, TokenFile, token_array
from longspan.errors import UserError
from longspan.evaluation import Score, has_changed, held_out, split_to_score
from longspan.evaluation import evaluate as score_tokens
from longspan.language_model import LoadedModel, load
from longspan.runs import RunFolder

Progress = Callable[[int, int], None]
TIMEOUT_SECONDS = 600  # how long the processes of torchrun wait for each other


def evaluate(
    model: LoadedModel | str | os.PathLike[str],
    data: Any = None,
    split: str | None = None,
    *,
    protocol: str | None = None,
    batch_size: int | None = None,
    block_length: int | None = None,
    max_tokens: int | None = None,
    memory: bool = True,
    by_position: bool = False,
    checkpoint: Literal["best", "last"] = "best",
    device: str = "auto",
    progress: Progress | None = None,
) -> Score:
    """Score a model on held-out text; the same numbers as `longspan eval`.

    `model` is a run, the path of its folder, or what `load` returned; `checkpoint` and `device` are for runs.
    `data` is the corpus of the run, or another one by name or path, or token ids: an array, or a dict of
    arrays with the splits. `split` is train, valid or test: a file is split as training would split it.
    Without `split`, a file or an array is scored as a whole, everything else on its test split. With
    `memory=False` every block starts from an empty state. With `by_position=True` the score has the loss of
    every position in a block, `score.by_position`. Settings that are not given are those of the run.
    `progress(done, total)` gets the number of tokens scored so far, and of all tokens.
    Under torchrun all processes must call this: they divide the text, and each gets the whole score.
    """
    loaded = loaded_model(model, checkpoint, device)
    config = evaluation_config(
        loaded, protocol=protocol, batch_size=batch_size, block_length=block_length, max_tokens=max_tokens
    )
    tokens = tokens_of(loaded, data, split)
    with distributed.joined(loaded.device, TIMEOUT_SECONDS):
        return score_tokens(
            loaded.model,
            tokens,
            tokenizer=loaded.tokenizer,
            config=config,
            block_length=loaded.config.training.block_length,
            max_tokens=max_tokens,
            memory=memory,
            by_position=by_position,
            device=loaded.device,
            progress=progress,
        )


def loaded_model(
    model: LoadedModel | str | os.PathLike[str], checkpoint: Literal["best", "last"], device: str
) -> LoadedModel:
    return model if isinstance(model, LoadedModel) else load(Path(model), checkpoint, device)


def evaluation_config(loaded: LoadedModel, **settings: Any) -> EvaluationConfig:
    """The run's own settings, except those that are not None."""
    table = schema.write(loaded.config.evaluation)
    table |= {name: value for name, value in settings.items() if value is not None}
    return schema.read(EvaluationConfig, table, "evaluation")


def tokens_of(loaded: LoadedModel, data: Any, split: str | None) -> TokenFile | TokenArray:
    """What `data` and `split` of `evaluate` mean, as tokens."""
    if isinstance(data, Mapping):
        split = split or "test"
        if split not in data:
            raise UserError(f"data has no '{split}' split (only {', '.join(data)})")
        return token_array(data[split], loaded.tokenizer, f"the {split} split")
    if data is not None and not isinstance(data, str | os.PathLike):
        return token_array(data, loaded.tokenizer)
    corpus = loaded.config.data.corpus if data is None else os.fspath(data)
    if data is None and not corpus:
        raise UserError(f"{loaded.path} has no corpus: give data, a corpus or token ids")
    split = split_to_score(split, None if data is None else corpus)
    if data is None and split != "train" and has_changed(RunFolder.open(loaded.path), _quiet):
        warnings.warn(
            f"the text of {corpus} has changed since the run began: its {split} split may hold text that the "
            "model was trained on",
            stacklevel=3,
        )
    data = loaded.config.data
    return held_out(
        corpus, split, loaded.tokenizer, data.tokenizer, _quiet, binary=data.binary, field=data.field
    )


def _quiet(line: str) -> None:
    pass
