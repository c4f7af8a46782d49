"""Configurations: what is right comes back as it was, what is wrong is one line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan import recipes
from longspan.config import RunConfig, StageConfig, schema
from longspan.config.reference import documented
from longspan.config.transformer_xl import XLVocabularyConfig
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
        ("model.span.renormalise", "false", 'without renormalise, softmax_over must be "layer"'),
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
        ("training.seed", "9223372036854775808", "'training.seed' is too large"),
        ("stage.0.learning-rate", "1" + 400 * "0", "'stage.0.learning_rate' is too large"),
        ("name", "", "name must be usable for a folder"),
        ("name", "a/b", "name must be usable for a folder"),
        ("name", "..", "name must be usable for a folder"),
        ("name", "two\nlines", "name must be usable for a folder"),
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
        ("stage.0.learning-rate", "0"),
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


class TestStage:
    """An option that its optimizer or schedule does not heed is refused, not passed over."""

    @pytest.mark.parametrize("phase", ["momentum_warmup_steps", "momentum_cooldown"])
    def test_momentum_rises_from_its_start(self, phase: str) -> None:
        table = {"steps": 9, "learning_rate": 0.1, "optimizer": "normuon", phase: 1}
        assert schema.read(StageConfig, table | {"momentum": 0.85}).momentum == 0.85
        with pytest.raises(UserError, match=r"momentum_start must not be above momentum, 0\.8"):
            schema.read(StageConfig, table | {"momentum": 0.8})
        with pytest.raises(UserError, match=r"momentum_start must not be above momentum, 0\.95"):
            schema.read(StageConfig, table | {"momentum_start": 0.96})

    @pytest.mark.parametrize(
        ("choice", "option", "value", "default"),
        [
            *[(f"optimizer {kind}", "momentum", "0.9", "none") for kind in ("adam", "adamw", "adagrad")],
            *[(f"optimizer {kind}", "beta1", "0.8", "0.9") for kind in ("sgd", "adagrad")],
            *[(f"optimizer {kind}", "beta2", "0.95", "0.999") for kind in ("sgd", "adagrad")],
            *[
                (f"optimizer {kind}", "adamw_learning_rate", "0", "none")
                for kind in ("adam", "adamw", "adagrad", "sgd")
            ],
            *[
                ("optimizer adamw", option, value, default)
                for option, value, default in (
                    ("cautious_decay", "true", "false"),
                    ("momentum_start", "0.5", "0.85"),
                    ("momentum_warmup_steps", "3", "0"),
                    ("momentum_cooldown", "0.5", "0.0"),
                )
            ],
            *[(f"optimizer {kind}", "epsilon", "1e-9", "1e-08") for kind in ("adagrad", "lamb", "sgd")],
            ("optimizer adagrad", "weight_decay", "0.1", "0.0"),
            ("schedule constant", "final_fraction", "1", "0.0"),
            ("schedule inverse-sqrt", "final_fraction", "0.1", "0.0"),
        ],
    )
    def test_what_has_no_effect(self, choice: str, option: str, value: str, default: str) -> None:
        name, chosen = choice.split()
        with pytest.raises(UserError) as refused:
            changed(**{f"stage__0__{name}": chosen, f"stage__0__{option}": value})
        assert str(refused.value).startswith(f"stage.0: {option} has no effect with {choice} (only with ")
        assert str(refused.value).endswith(f"set it to its default, {default}")
        assert "\n" not in str(refused.value)
        changed(**{f"stage__0__{name}": chosen, f"stage__0__{option}": default})

    @pytest.mark.parametrize(
        ("choice", "options"),
        [
            ("optimizer muon", "momentum beta1 beta2 weight_decay adamw_learning_rate"),
            ("optimizer normuon", "momentum momentum_start momentum_cooldown epsilon adamw_learning_rate"),
            ("optimizer adagrad", "embedding_learning_rate head_learning_rate scalar_learning_rate"),
            ("optimizer sgd", "momentum weight_decay"),
            ("optimizer adam", "beta1 beta2 weight_decay"),
            ("optimizer adamw", "beta1 beta2 weight_decay"),
            ("schedule cosine", "final_fraction"),
        ],
    )
    def test_what_has(self, choice: str, options: str) -> None:
        name, chosen = choice.split()
        for option in options.split():
            stage = changed(**{f"stage__0__{name}": chosen, f"stage__0__{option}": "0.5"}).stage[0]
            assert getattr(stage, option) == 0.5

    def test_none_takes_back_what_a_recipe_says(self) -> None:
        """Else nobody could change the optimizer of a recipe from the command line."""
        typed = recipes.load("quickstart")
        for name, text in (
            ("optimizer", "adamw"),
            ("momentum", "none"),
            ("adamw-learning-rate", "none"),
            ("max-seconds", "none"),
        ):
            schema.override(typed, f"stage.0.{name}", text)
        stage = schema.read(RunConfig, typed).stage[0]
        assert (stage.momentum, stage.adamw_learning_rate, stage.max_seconds) == (None, None, None)
        with pytest.raises(UserError, match=r"'stage.0.learning_rate' must be a number, not 'none'"):
            changed(stage__0__learning_rate="none")


@dataclass(frozen=True, kw_only=True)
class Circle:
    shape: Literal["circle"] = schema.option("circle", help="which shape")
    radius: float = schema.option(help="how large")


@dataclass(frozen=True, kw_only=True)
class Box:
    shape: Literal["box"] = schema.option("box", help="which shape")
    width: int = schema.option(1, help="how wide")


@dataclass(frozen=True, kw_only=True)
class Drawing:
    figure: Circle | Box = schema.section(Box, help="what is drawn")


class TestTagged:
    """Where a table may be one of several dataclasses, the field they share says which."""

    @pytest.mark.parametrize("figure", [Circle(radius=2.0), Box(width=3), Box()])
    def test_the_tag_decides(self, figure: Circle | Box) -> None:
        drawing = Drawing(figure=figure)
        assert schema.read(Drawing, schema.write(drawing)) == drawing

    def test_without_a_tag_it_is_the_first(self) -> None:
        assert schema.read(Drawing, {"figure": {"radius": 2.0}}) == Drawing(figure=Circle(radius=2.0))

    def test_values_may_be_typed(self) -> None:
        typed: dict[str, Any] = {}
        schema.override(typed, "figure.shape", "circle")
        schema.override(typed, "figure.radius", "4")
        assert schema.read(Drawing, typed) == Drawing(figure=Circle(radius=4.0))

    @pytest.mark.parametrize(
        ("figure", "complaint"),
        [
            (7, "'figure' must be a table of options, not 7"),
            (
                {"shape": "cirkle"},
                "'figure.shape' must be one of circle, box, not 'cirkle'; did you mean 'circle'?",
            ),
            ({"shape": ["box"]}, "'figure.shape' must be one of circle, box, not ['box']"),
            ({"shape": "box", "radius": 1.0}, "unknown key 'figure.radius'"),
            ({"shape": "circle"}, "'figure.radius' is missing: how large"),
            ({"shape": "circle", "radius": "wide"}, "'figure.radius' must be a number, not 'wide'"),
        ],
    )
    def test_mistakes_are_one_line(self, figure: Any, complaint: str) -> None:
        with pytest.raises(UserError) as refused:
            schema.read(Drawing, {"figure": figure})
        assert str(refused.value).startswith(complaint)
        assert "\n" not in str(refused.value)


class TestWordOrList:
    """Where an option takes a word or a list."""

    @pytest.mark.parametrize("ties", ["all", "none", [True, False, True]])
    def test_either_is_read_typed_or_written(self, ties: str | list[bool]) -> None:
        table = {"cutoffs": [4, 8], "tied_projections": ties}
        config = schema.read(XLVocabularyConfig, table)
        assert config.tied_projections == (ties if isinstance(ties, str) else tuple(ties))
        assert schema.read(XLVocabularyConfig, schema.write(config)) == config
        typed: dict[str, Any] = {"cutoffs": [4, 8]}
        schema.override(typed, "tied-projections", str(ties).lower())
        assert schema.read(XLVocabularyConfig, typed) == config

    @pytest.mark.parametrize(
        ("ties", "complaint"),
        [
            (
                "al",
                "'tied_projections' must be one of none, all-but-first, all, not 'al'; did you mean 'all'?",
            ),
            (3, "'tied_projections' must be one of none, all-but-first, all, not 3"),
            ([True, 1, True], "'tied_projections.1' must be true or false, not 1"),
            ([True], "configuration: tied_projections has 1 entries for 3 clusters"),
        ],
    )
    def test_mistakes_are_one_line(self, ties: Any, complaint: str) -> None:
        with pytest.raises(UserError) as refused:
            schema.read(XLVocabularyConfig, {"cutoffs": [4, 8], "tied_projections": ties})
        assert str(refused.value) == complaint


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


def test_a_byte_order_mark_is_no_part_of_the_text() -> None:
    assert schema.parse_toml(b'\xef\xbb\xbfname = "x"\r\n', "x.toml") == {"name": "x"}


def test_a_configuration_survives_its_file() -> None:
    config = RunConfig(
        name="größer", stage=(StageConfig(steps=1, learning_rate=0.5, optimizer="sgd", momentum=0.0),)
    )
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


@pytest.mark.parametrize(
    ("section", "old", "new", "value"),
    [
        ("training", "passage_length", "segment_length", 8192),
        ("training", "rehearsal", "compile_warmup", 3),
        ("model", "query_key_norm", "qk_norm", False),
        ("model", "rotary_base", "rope_base", 500.0),
    ],
)
def test_an_option_is_still_read_by_its_old_name(section: str, old: str, new: str, value: Any) -> None:
    table = recipes.load("flagship")
    table[section].pop(new, None)
    table[section][old] = value
    with pytest.warns(FutureWarning, match=f"'{section}.{old}' is now called '{section}.{new}'"):
        config = schema.read(RunConfig, table)
    assert getattr(getattr(config, section), new) == value


def test_an_option_cannot_be_given_by_both_names() -> None:
    table = recipes.load("flagship")
    table["training"] |= {"segment_length": 1024, "passage_length": 1024}
    with (
        pytest.warns(FutureWarning, match="segment_length"),
        pytest.raises(UserError, match=r"'training.segment_length' is given twice"),
    ):
        schema.read(RunConfig, table)
