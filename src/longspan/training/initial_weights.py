"""A run that starts from weights of another run: its tokenizer, and its first weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from longspan.config import RunConfig
from longspan.data import Tokenizer
from longspan.models import LanguageModel
from longspan.runs import RunFolder
from longspan.runs.init import Init
from longspan.runs.load_weights import load_weights
from longspan.runs.resume_checks import is_fixed
from longspan.training.changed_options import differences
from longspan.training.reporter import Reporter


def with_tokenizer(
    init: Init | None, config: RunConfig, reporter: Reporter
) -> tuple[RunConfig, Tokenizer | None]:
    """The tokenizer of the run that the weights come from, and the configuration with its settings.

    None if a vocabulary is to be learned.
    """
    run = None if init is None or not init.with_tokenizer else init.run
    if run is None:
        return config, None
    tokenizer, settings = run.tokenizer(), run.config.data.tokenizer
    reporter.say(
        f"tokenizer of {run.path}: {settings.kind}, vocabulary {tokenizer.vocabulary_size:,} (to learn a new "
        "one, give --data.tokenizer.kind)"
    )
    return replace(config, data=replace(config.data, tokenizer=settings)), tokenizer


def load_first(
    init: Init, model: LanguageModel, config: RunConfig, tokenizer: Tokenizer, reporter: Reporter
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load the weights into a new model; returns what the run folder keeps of them."""
    for line in init.load(model):
        reporter.say(line)
    if (run := init.run) is not None and (others := _other_options(run.config, config)):
        reporter.say(f"the model has other options than {run.path}: {', '.join(others)}")
    if (warning := init.other_tokens(tokenizer)) is not None:
        reporter.say(warning)
    return init.facts(), {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def _other_options(before: RunConfig, now: RunConfig) -> list[str]:
    """Options of the model that differ: weights that fit may still mean something else, such as n-grams."""
    return [
        line
        for line in differences(before, now)
        if line.startswith("model.") and is_fixed(line.partition(" ")[0])
    ]


def load_again(folder: RunFolder, model: LanguageModel) -> None:
    """Load the first weights of a run that was stopped before its first checkpoint."""
    load_weights(model, folder.init)
