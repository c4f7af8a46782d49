"""The notice that a model has memorised its text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from longspan.config import TrainingConfig
from longspan.data import token_array
from longspan.data.given import GivenTokens
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.training import memorised, train
from tests.training.runs import Lines, small_config, write_text

TOKENS = token_array(np.zeros(100, dtype=np.int64), ByteTokenizer())


@pytest.mark.parametrize(
    ("tokens", "valid_loss", "evaluate_every", "notice"),
    [
        (299, 2.0, 0, False),  # not yet three times
        (310, 2.0, 0, True),
        (310, 1.24, 0, False),  # not much worse than training text
        (310, 1.25, 0, True),
        (310, 2.0, 50, False),  # the best weights were kept
    ],
)
def test_when_it_comes(tokens: int, valid_loss: float, evaluate_every: int, notice: bool) -> None:
    corpus = GivenTokens("", ByteTokenizer(), {"train": TOKENS}, None)
    training = TrainingConfig(evaluate_every=evaluate_every)
    found = memorised.notice(training, corpus, tokens=tokens, train_loss=1.0, valid_loss=valid_loss)
    assert (found is not None) == notice
    if found is not None:
        assert "the text was read 3.1 times" in found
    blocks = GivenTokens("", ByteTokenizer(), {"valid": TOKENS}, None)
    assert memorised.notice(training, blocks, tokens=9999, train_loss=1.0, valid_loss=9.0) is None


def test_a_run_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memorised, "READINGS", 0)
    monkeypatch.setattr(memorised, "RATIO", 0.5)
    said = Lines()
    train(small_config(write_text(tmp_path), training__evaluate_every=0), tmp_path / "run", reporter=said)
    assert "overfitting: the text was read 0.6 times" in said.lines[-1]
