"""Every recipe of the package: it can be read, built and run, and is as large as it says."""

from __future__ import annotations

import pytest
import torch

from longspan import recipes
from longspan.cli.recipes import PUBLISHED
from longspan.config import RunConfig, schema
from longspan.data import corpora
from longspan.data.tokenizers import check_settings
from longspan.models import build
from longspan.optim import build_optimizers

BYTES = 256  # where the text decides the vocabulary and nobody has published what it decides


@pytest.fixture(params=recipes.names())
def config(request: pytest.FixtureRequest) -> RunConfig:
    return schema.read(RunConfig, recipes.load(request.param))


def test_the_papers_are_there() -> None:
    assert {"enwik8", "enwik8-small", "enwik8-large", "text8", "text8-large"} <= set(recipes.names())


def test_it_is_called_what_its_file_is_called() -> None:
    for name in recipes.names():
        assert recipes.load(name)["name"] == name


def test_it_survives_its_own_file(config: RunConfig) -> None:
    assert RunConfig.from_toml(config.to_toml().encode(), config.name) == config


def test_its_text_is_known(config: RunConfig) -> None:
    assert config.data.corpus in corpora.NAMED
    check_settings(config.data.tokenizer)


def test_it_builds_and_is_as_large_as_expected(config: RunConfig) -> None:
    tokenizer = config.data.tokenizer
    published = PUBLISHED.get((config.data.corpus, tokenizer.kind), BYTES)
    with torch.device("meta"):
        model = build(config.model, tokenizer.vocabulary_size or published)
    assert config.stage
    for stage in config.stage:
        assert build_optimizers(model, stage)
    if "parameters" in config.expected:
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        assert num_parameters == pytest.approx(config.expected["parameters"], rel=0.02)


@pytest.mark.parametrize(
    ("name", "vocabulary_size", "parameters"),
    [("txl-enwik8", 204, 41e6), ("txl-wikitext-103", 267_735, 151e6)],
)
def test_transformer_xl_is_as_large_as_published(name: str, vocabulary_size: int, parameters: float) -> None:
    config = schema.read(RunConfig, recipes.load(name))
    with torch.device("meta"):
        model = build(config.model, vocabulary_size)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(parameters, rel=0.01)


def test_words_in_clusters_make_wiki103_as_small_as_published() -> None:
    config = schema.read(RunConfig, recipes.load("wiki103-pers"))
    with torch.device("meta"):
        model = build(config.model, 267_735)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(133e6, rel=0.01)


def test_the_papers_state_their_sizes() -> None:
    for name in ("enwik8", "enwik8-large", "text8", "text8-large"):
        assert "parameters" in recipes.load(name)["expected"]


def test_large_ones_are_fine_tuned_at_a_tenth_of_the_rate() -> None:
    for name in ("enwik8-large", "text8-large"):
        main, fine = schema.read(RunConfig, recipes.load(name)).stage
        assert fine.optimizer == main.optimizer == "adagrad"
        assert fine.learning_rate == pytest.approx(main.learning_rate / 10)
