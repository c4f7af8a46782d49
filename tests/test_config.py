"""Configurations: what is right comes back as it was, what is wrong is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan import recipes
from longspan.config import RunConfig, StageConfig, schema
from longspan.config.reference import documented
from longspan.errors import UserError
from longspan.runs import RunFolder

OPTIONS = [option.name for option in documented(RunConfig)]


def table() -> dict[str, Any]:
    return {"stage": [{"steps": 10, "learning_rate": 0.1}]}


def changed(**changes: str) -> RunConfig:
    """The default configuration with options as typed, `__` for the dots."""
    typed = table()
    for name, text in changes.items():
        schema.override(typed, name.replace("__", "."), text)
    return schema.read(RunConfig, typed)


@pytest.mark.parametrize(
    ("option", "text", "complaint"),
    [
        ("model.dropout", "1.0", "dropout and embedding_dropout must be at least 0 and below 1"),
        ("model.dropout", "-0.1", "dropout and embedding_dropout must be at least 0 and below 1"),
        ("model.embedding-dropout", "1.5", "dropout and embedding_dropout must be at least 0 and below 1"),
        ("model.span.penalty", "-1e-6", "penalty must not be negative"),
        ("evaluation.batch-size", "0", "evaluation: batch_size must be at least 1"),
        ("evaluation.block-length", "0", "evaluation: block_length must be at least 1"),
        ("evaluation.max-tokens", "-5", "evaluation: max_tokens must be at least 1"),
        ("evaluation.max-tokens-final", "0", "evaluation: max_tokens_final must be at least 1"),
        ("stage.0.learning-rate", "-0.1", "stage.0: learning_rate must not be negative"),
        ("stage.0.adamw-learning-rate", "-0.1", "adamw_learning_rate must not be negative"),
        ("stage.0.final-fraction", "1.1", "final_fraction must lie between 0 and 1"),
        ("stage.0.momentum", "1", "momentum must be at least 0 and below 1"),
        ("stage.0.max-seconds", "0", "max_seconds must be above 0"),
        ("stage.0.learning-rate", "nan", "'stage.0.learning_rate' must be a number, not nan"),
        ("stage.0.clip-norm", "inf", "'stage.0.clip_norm' must be a number, not inf"),
        ("training.seed", "-1", "seed must lie between 0 and 2^63 - 1"),
        ("training.seed", "9223372036854775808", "'training.seed' has more digits"),
        ("stage.0.learning-rate", "1" + 400 * "0", "'stage.0.learning_rate' has more digits"),
        ("name", "", "name must do for a folder"),
        ("name", "a/b", "name must do for a folder"),
        ("name", "..", "name must do for a folder"),
        ("name", "two\nlines", "name must do for a folder"),
        ("stage.²", "1", "'²' is not one of the 1 entries"),
    ],
)
def test_values_that_cannot_be(option: str, text: str, complaint: str) -> None:
    with pytest.raises(UserError) as refused:
        changed(**{option.replace(".", "__"): text})
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("model.dropout", "0"),
        ("stage.0.adamw-learning-rate", "0"),
        ("stage.0.learning-rate", "0"),
        ("stage.0.final-fraction", "1"),
        ("training.seed", "9223372036854775807"),
        ("evaluation.max-tokens", "1"),
    ],
)
def test_values_at_the_edge(option: str, text: str) -> None:
    changed(**{option.replace(".", "__"): text})


ODD = ["", "0", "-1", "-0.5", "1e400", "nan", "inf", "1" * 30, "true", "[]", "[1]", "{}", "{a=1}", "'", '"']
ODD += ["=", "#", "two\nlines", "\0", "1979-05-27", "byte", "9223372036854775807", "5000000000"]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(OPTIONS), st.sampled_from(ODD) | st.text(max_size=8))
def test_any_value_is_taken_or_refused_in_one_line(option: str, text: str) -> None:
    complaint = "refused"
    try:
        config = changed(**{option.replace(".", "__"): text})
    except UserError as refused:
        complaint = str(refused)
    else:
        assert RunConfig.from_toml(config.to_toml().encode(), "itself") == config
    assert len(complaint.splitlines()) == 1


class TestTyped:
    """The option decides what a typed word is."""

    @pytest.mark.parametrize("text", ["1984", "true", "1e5", "2020-01-01", '"quoted"', "[a]"])
    def test_text_stays_text(self, text: str) -> None:
        assert changed(data__corpus=text).data.corpus == text
        assert changed(name=text).name == text

    def test_numbers_are_numbers(self) -> None:
        config = changed(stage__0__steps="1_000", stage__0__learning_rate="1", training__compile="true")
        assert config.stage[0].steps == 1000
        assert config.stage[0].learning_rate == 1.0
        assert config.training.compile is True

    def test_optional_numbers_too(self) -> None:
        assert changed(evaluation__max_tokens="12").evaluation.max_tokens == 12
        with pytest.raises(UserError, match=r"'evaluation.max_tokens' must be a whole number, not 'many'"):
            changed(evaluation__max_tokens="many")

    def test_tables_are_toml(self) -> None:
        config = changed(data__tokenizer='{kind = "word", order = "first-seen"}', expected__size="[1, 2]")
        assert config.data.tokenizer.kind == "word"
        assert config.expected == {"size": [1, 2]}


def test_a_configuration_survives_its_file() -> None:
    config = RunConfig(name="größer", stage=(StageConfig(steps=1, learning_rate=0.5, momentum=0.0),))
    assert RunConfig.from_toml(config.to_toml().encode(), "itself") == config


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('name = "größer"'.encode("latin-1"), "is not UTF-8 text"),
        (b"name = ", "is not valid TOML"),
        (b"training.seed = " + b"9" * 5000, "is not valid TOML"),
    ],
)
def test_files_that_are_not_configurations(tmp_path: Path, content: bytes, complaint: str) -> None:
    source = tmp_path / "config.toml"
    source.write_bytes(content)
    with pytest.raises(UserError, match=complaint) as refused:
        recipes.load(str(source))
    assert str(source) in str(refused.value)
    with pytest.raises(UserError, match=complaint):
        RunFolder.open(tmp_path).config  # noqa: B018


def test_every_option_is_documented_once() -> None:
    assert len(OPTIONS) == len(set(OPTIONS))
    assert all(option.help and option.type for option in documented(RunConfig))
