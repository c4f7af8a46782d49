"""Makes a run folder with fixed windows from a run with learned spans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from longspan.errors import UserError
from longspan.models import build
from longspan.models.windows import with_frozen_spans
from longspan.runs import checkpoint
from longspan.runs.check_weights import check_weights
from longspan.runs.folder import RunFolder


def freeze_spans(run: RunFolder, out: Path) -> RunFolder:
    """Create the run folder `out` with the best weights of a run and its learned spans as fixed windows.

    It is for evaluation and generation. Its windows can also be copied into the recipe of a new training.
    """
    RunFolder.must_be_new(out)
    if run.config.search is not None:
        raise UserError("a search has no fixed blocks yet: train its found.toml, and freeze that run")
    tokenizer, best = run.tokenizer(), run.checkpoint("best")
    weights = checkpoint.load(best).below("model")
    model = build(run.config.model, tokenizer.vocabulary_size)
    check_weights(model, weights, best)
    model.load_state_dict(weights)
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
