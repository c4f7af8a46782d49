"""`longspan.context_curve` and `longspan.dynamic_evaluation`: other questions to a model and a text."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from longspan import distributed
from longspan.api.evaluation import TIMEOUT_SECONDS, Progress, evaluation_config, loaded_model, tokens_of
from longspan.data import TokenArray, TokenFile
from longspan.errors import UserError
from longspan.evaluation import ContextCurve, DynamicScore
from longspan.evaluation import context_curve as curve_of
from longspan.evaluation import dynamic_evaluation as score_dynamically
from longspan.evaluation.context_curve import CONTEXTS, LANES, SCORED_TOKENS
from longspan.language_model import LoadedModel


def context_curve(
    model: LoadedModel | str | os.PathLike[str],
    data: Any = None,
    split: str | None = None,
    *,
    contexts: Sequence[int] = CONTEXTS,
    scored_tokens: int = SCORED_TOKENS,
    batch_size: int | None = None,
    block_length: int | None = None,
    max_tokens: int | None = None,
    checkpoint: Literal["best", "last"] = "best",
    device: str = "auto",
    progress: Progress | None = None,
) -> ContextCurve:
    """Bits as a function of how many tokens of the past a model may see, as `longspan eval --context-curve`.

    `model`, `data` and `split` are those of `evaluate`. Every context scores the same `scored_tokens` tokens,
    taken from the first `max_tokens` of the text (default: 1,048,576). There are at most `batch_size` lanes,
    8 unless given. The last point is all of the past.
    """
    numbers = [*contexts, scored_tokens] if isinstance(contexts, Sequence) else [None]
    if not all(isinstance(number, int) and number >= 1 for number in numbers):
        raise UserError("contexts must be a list of whole numbers, and scored_tokens one, each at least 1")
    loaded = loaded_model(model, checkpoint, device)
    config = evaluation_config(
        loaded, batch_size=batch_size, block_length=block_length, max_tokens=max_tokens
    )
    tokens = tokens_of(loaded, data, split)
    with distributed.joined(loaded.device, TIMEOUT_SECONDS):
        return curve_of(
            loaded.model,
            tokens,
            tokenizer=loaded.tokenizer,
            batch_size=batch_size or LANES,
            block_length=config.block_length or loaded.config.training.block_length,
            contexts=contexts,
            scored_tokens=scored_tokens,
            max_tokens=max_tokens,
            device=loaded.device,
            progress=progress,
        )


def dynamic_evaluation(
    model: LoadedModel | str | os.PathLike[str],
    data: Any = None,
    split: str | None = None,
    *,
    rule: Literal["sgd", "rms"] = "rms",
    rate: float | None = None,
    decay: float | None = None,
    training: Any = None,
    protocol: str | None = None,
    batch_size: int = 1,
    block_length: int | None = None,
    max_tokens: int | None = None,
    checkpoint: Literal["best", "last"] = "best",
    device: str = "auto",
    progress: Progress | None = None,
) -> DynamicScore:
    """Scores with fixed weights and with a gradient step after every block, as `longspan eval --dynamic`.

    `model`, `data` and `split` are those of `evaluate`. `training` is the text for the gradients of rule rms:
    token ids, a corpus or, by default, the run's own training split. The model is not changed.
    """
    if rule not in ("sgd", "rms"):
        raise UserError(f"there is no rule '{rule}' (one of sgd, rms)")
    given = [number for number in (rate, decay) if number is not None]
    numbers = all(isinstance(number, int | float) for number in given)
    if not numbers or not 0 <= (rate or 0.0) < math.inf or not 0 <= (decay or 0.0) <= 1:
        raise UserError("rate must be a number of at least 0, and decay one between 0 and 1")
    if distributed.launched():
        raise UserError("dynamic evaluation is for one process, since every block changes the weights")
    loaded = loaded_model(model, checkpoint, device)
    config = evaluation_config(
        loaded, protocol=protocol, batch_size=batch_size, block_length=block_length, max_tokens=max_tokens
    )
    return score_dynamically(
        loaded.model,
        tokens_of(loaded, data, split),
        tokenizer=loaded.tokenizer,
        config=config,
        block_length=loaded.config.training.block_length,
        rule=rule,
        rate=rate,
        decay=decay,
        training=_training(loaded, training) if rule == "rms" else None,
        max_tokens=max_tokens,
        device=loaded.device,
        progress=progress,
    )


def _training(loaded: LoadedModel, training: Any) -> TokenFile | TokenArray:
    """An array is all training text, everything else has a train split."""
    is_array = training is not None and not isinstance(training, str | os.PathLike)
    return tokens_of(loaded, training, None if is_array and not isinstance(training, Mapping) else "train")
