"""The arithmetic of a score."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from longspan.evaluation import Score
from longspan.evaluation.by_position import by_position

SCORE = Score(
    nats=80.0 * math.log(2),
    tokens=20,
    divisor=20,
    bytes=40,
    characters=32,
    words=10,
    unknown=3,
    skipped=1,
    skipped_because="the first token has no context",
    protocol="every-token",
    batch_size=1,
    block_length=8,
)


def test_each_figure_has_its_own_denominator() -> None:
    assert SCORE.loss == pytest.approx(4 * math.log(2))
    assert SCORE.bits_per_token == pytest.approx(4.0)
    assert SCORE.perplexity == pytest.approx(16.0)
    assert SCORE.bits_per_byte == pytest.approx(2.0)
    assert SCORE.bits_per_character == pytest.approx(2.5)
    assert SCORE.perplexity_per_word == pytest.approx(256.0)


def test_a_protocol_may_divide_by_more_than_it_scores() -> None:
    score = dataclasses.replace(SCORE, divisor=40)
    assert score.bits_per_token == pytest.approx(2.0)
    assert score.bits_per_byte == SCORE.bits_per_byte  # the text is what it is


def test_a_hopeless_model_has_infinite_perplexity() -> None:
    assert dataclasses.replace(SCORE, nats=1e6).perplexity == math.inf
    assert dataclasses.replace(SCORE, nats=1e6).perplexity_per_word == math.inf


def test_a_scrap_of_text_has_no_figure_per_word_or_character() -> None:
    scrap = dataclasses.replace(SCORE, characters=0, words=0)
    assert (scrap.bits_per_character, scrap.perplexity_per_word) == (math.inf, math.inf)


def test_positions_and_missing_memory_are_in_the_figures() -> None:
    assert not {"memory", "by_position"} & SCORE.figures().keys()
    parts = by_position([60.0, 20.0], [12, 8])
    figures = dataclasses.replace(SCORE, memory=False, by_position=parts).figures()
    assert figures["memory"] is False
    assert figures["by_position"] == [
        {"position": 1, "tokens": 12, "nats": 60.0, "loss": 5.0},
        {"position": 2, "tokens": 8, "nats": 20.0, "loss": 2.5},
    ]


def test_figures_are_all_there_is_and_json() -> None:
    figures = SCORE.figures()
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures
    assert {
        name: figures[name] for name in ("nats", "words", "unknown", "protocol", "bits_per_byte", "loss")
    } == {
        "nats": SCORE.nats,
        "words": 10,
        "unknown": 3,
        "protocol": "every-token",
        "bits_per_byte": SCORE.bits_per_byte,
        "loss": SCORE.loss,
    }
    hopeless = dataclasses.replace(SCORE, nats=1e6).figures()
    assert figures.keys() - hopeless.keys() == {"perplexity", "perplexity_per_word"}
