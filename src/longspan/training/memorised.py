"""A notice if a model has memorised its text: how to keep better weights."""

from __future__ import annotations

from longspan.config import TrainingConfig
from longspan.data import GivenTokens, TokenizedCorpus

READINGS = 3
RATIO = 1.25


def notice(
    training: TrainingConfig,
    corpus: TokenizedCorpus | GivenTokens,
    *,
    tokens: int,
    train_loss: float,
    valid_loss: float,
) -> str | None:
    """A line for the user if the text was read often, and held-out text is predicted much worse.

    `tokens` is how many were trained on. None if evaluations during the training kept the best weights.
    """
    if training.evaluate_every or "train" not in corpus.splits:
        return None
    readings = tokens / len(corpus.splits["train"])
    if readings < READINGS or valid_loss < RATIO * train_loss:
        return None
    return (
        f"overfitting: the text was read {readings:.1f} times, and held-out text is predicted much worse "
        "than training text; evaluations during the training (training.evaluate_every) keep the best weights"
    )
