"""Makes a run folder with fixed windows from a run with learned spans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from longspan.errors import UserError
from longspan.models import build
from longspan.models.windows import with_frozen_spans
from longspan.runs.folder import RunFolder
from longspan.runs.load_weights import load_weights


def freeze_spans(run: RunFolder, out: Path) -> RunFolder:
    """Create the run folder `out` with the best weights of a run and its learned spans as fixed windows.

    It is for evaluation and generation. Its windows can also be copied into the recipe of a new training.
    """
    RunFolder.must_be_new(out)
    if run.config.search is not None:
        raise UserError("a search has no fixed blocks yet: train its found.toml, and freeze that run")
    tokenizer, best = run.tokenizer(), run.checkpoint("best")
    model = build(run.config.model, tokenizer.vocabulary_size)
    weights = load_weights(model, best)
    config = replace(
        run.config,
        name=out.absolute().name,
        description=f"{run.config.name} with the spans it has learned, frozen",
        model=with_frozen_spans(run.config.model, model),
        stage=(),
        expected={},
    )
    kept = build(config.model, tokenizer.vocabulary_size).state_dict().keys()
    return RunFolder.create_with_weights(
        out,
        config,
        tokenizer,
        run.fingerprint,
        {name: tensor for name, tensor in weights.items() if name in kept},
        {"frozen": {"run": run.config.name}},
    )
