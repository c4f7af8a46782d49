"""`longspan.train` and `longspan.resume`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from longspan import recipes, training
from longspan.api.run import Run
from longspan.config import DataConfig, RunConfig, TokenizerConfig, schema
from longspan.config.overrides import override_all
from longspan.data import GivenTokens, Tokenizer, given_tokens
from longspan.data.tokenizers.number import NumberTokenizer
from longspan.errors import UserError
from longspan.files import free_folder
from longspan.runs import RunFolder
from longspan.runs.init import Init
from longspan.training import Reporter, Stopped, reporter_for_stdout

Callback = Callable[[dict[str, Any]], object]


def train(
    recipe: str | Path | Mapping[str, Any] | RunConfig | None = None,
    data: str | Path | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    *,
    vocabulary_size: int | None = None,
    tokenizer: Tokenizer | None = None,
    init: str | os.PathLike[str] | None = None,
    init_partial: bool = False,
    callback: Callback | None = None,
    progress: bool | Reporter = False,
    **overrides: Any,
) -> Run:
    """Train a model and score it on held-out text.

    `recipe` is the name of a recipe, the path of a TOML file, a table as in TOML, or a `RunConfig`
    (default: quickstart).
    `data` is a corpus by name, a text file or a folder; or tokens: a dict with the splits `train`, `valid`
    and, if there is one, `test`. Each is an array of token ids, and `train` may be blocks instead: see
    `longspan.data.given.BlockStream`. Tokens need their `tokenizer`, or only a `vocabulary_size`; bits per
    byte are known only with a tokenizer.
    `out` is the new run folder: by default `runs/` and the name of the recipe, with a number if it is taken.
    `init` is a run, or a checkpoint file, whose weights the new run starts from. The tokenizer is that of the
    run, unless a `tokenizer` or an override of `data.tokenizer` is given; without a recipe the configuration
    is that of the run. With `init_partial` weights that do not fit are left out.
    `callback` gets every line of training and validation metrics as a dict; if it returns False, the run is
    saved and ends there, and `resume` continues it.
    `progress` shows on stdout what the command `longspan train` shows, or calls the reporter it is given.
    `overrides` change options by their dotted names, with `__` for the dots: `model__num_layers=6`.
    """
    start = _init(init, init_partial, overrides)
    if recipe is None:
        recipe = recipes.DEFAULT if start is None else start.recipe()
    config = _configuration(recipe, out, overrides)
    given = None
    if isinstance(data, Mapping):
        if tokenizer is None and vocabulary_size is None and start is not None and start.run is not None:
            tokenizer = start.run.tokenizer()
        given = given_tokens(data, _tokenizer(tokenizer, vocabulary_size))
        config = _with_tokens(config, given)
    elif data is not None and not isinstance(data, str | os.PathLike):
        raise UserError("token ids need splits: data={'train': ids, 'valid': ids}")
    elif tokenizer is not None or vocabulary_size is not None:
        raise UserError(
            "tokenizer and vocabulary_size are for token ids: a corpus has its own in data.tokenizer"
        )
    elif data is not None:
        config = replace(config, data=replace(config.data, corpus=str(data)))
    path = free_folder(Path("runs") / config.name) if out is None else Path(out)
    try:
        folder = training.train(
            config, path, given=given, init=start, reporter=_reporter(progress), callback=callback
        )
    except Stopped:
        folder = RunFolder.open(path)
    return Run(folder)


def resume(
    run: str | os.PathLike[str],
    data: Mapping[str, Any] | None = None,
    *,
    callback: Callback | None = None,
    progress: bool | Reporter = False,
) -> Run:
    """Go on with a run that was stopped, as if it had not been; a finished one stays as it is.

    A run that was trained on tokens needs the same tokens again as `data`. Where `train` is an iterator it
    cannot be resumed; where it is a function of a block's number, it is called with the next number.
    """
    folder = RunFolder.open(Path(run))
    given = None if data is None else given_tokens(data, folder.tokenizer())
    with suppress(Stopped):
        training.resume(folder.path, given=given, reporter=_reporter(progress), callback=callback)
    return Run(folder)


def _configuration(
    recipe: str | Path | Mapping[str, Any] | RunConfig, out: str | Path | None, overrides: Mapping[str, Any]
) -> RunConfig:
    if isinstance(recipe, RunConfig):
        if not overrides:
            return recipe
        table = schema.write(recipe)
    elif isinstance(recipe, Mapping):
        table = copy.deepcopy(dict(recipe))
    else:
        table = recipes.load(str(recipe))
    if out is not None and not isinstance(recipe, RunConfig):
        table["name"] = os.path.basename(os.path.abspath(out))
    override_all(table, overrides)
    return schema.read(RunConfig, table)


def _init(path: str | os.PathLike[str] | None, partial: bool, overrides: Mapping[str, Any]) -> Init | None:
    if path is None:
        if partial:
            raise UserError("init_partial needs the weights to start from: give init")
        return None
    own = any(name.replace("__", ".").startswith("data.tokenizer") for name in overrides)
    return Init(Path(path), partial, with_tokenizer=not own)


def _tokenizer(tokenizer: Tokenizer | None, vocabulary_size: int | None) -> Tokenizer:
    if (tokenizer is None) == (vocabulary_size is None):
        raise UserError(
            "token ids need either vocabulary_size, how many different ones there are, or tokenizer"
        )
    if tokenizer is not None:
        return tokenizer
    assert vocabulary_size is not None
    if vocabulary_size < 1:
        raise UserError(f"vocabulary_size must be at least 1, not {vocabulary_size}")
    return NumberTokenizer(vocabulary_size)


def _with_tokens(config: RunConfig, given: GivenTokens) -> RunConfig:
    """The configuration of a run that has no corpus; blocks from an iterator end and do not start again."""
    tokenizer = given.tokenizer
    size = tokenizer.vocabulary_size if isinstance(tokenizer, NumberTokenizer) else None
    kind: Any = tokenizer.kind
    read = TokenizerConfig(kind=kind, vocabulary_size=size, lowercase=tokenizer.lowercase)
    config = replace(config, data=DataConfig(corpus="", tokenizer=read))
    if given.blocks is None:
        return config
    if any(stage.epochs for stage in config.stage):
        raise UserError("blocks from an iterator have no epochs: give the length of the stages in steps")
    if any(stage.when for stage in config.stage):
        raise UserError(
            "blocks from an iterator have no epochs, so the rate cannot fall after some: remove when"
        )
    stops = replace(config.training, at_end="stop", segment_length=None, block_jitter=False)
    return replace(config, training=stops)


def _reporter(progress: bool | Reporter) -> Reporter | None:
    if isinstance(progress, Reporter):
        return progress
    return reporter_for_stdout() if progress else None
