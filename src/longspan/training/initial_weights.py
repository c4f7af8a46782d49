"""A run that starts from weights of another run: its tokenizer, and its first weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from longspan.config import RunConfig
from longspan.data import Tokenizer
from longspan.models import LanguageModel
from longspan.runs import RunFolder, checkpoint
from longspan.runs.check_weights import check_weights
from longspan.runs.init import Init
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
    init: Init, model: LanguageModel, tokenizer: Tokenizer, reporter: Reporter
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Load the weights into a new model; returns what the run folder keeps of them."""
    for line in init.load(model):
        reporter.say(line)
    if (warning := init.other_tokens(tokenizer)) is not None:
        reporter.say(warning)
    return init.facts(), {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def load_again(folder: RunFolder, model: LanguageModel) -> None:
    """Load the first weights of a run that was stopped before its first checkpoint."""
    weights = checkpoint.load(folder.init).below("model")
    check_weights(model, weights, folder.init)
    model.load_state_dict(weights)
