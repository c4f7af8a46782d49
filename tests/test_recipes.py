"""Every recipe of the package: it can be read, built and run, and is as large as it says."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from longspan import recipes
from longspan.cli.recipes import PUBLISHED
from longspan.config import RunConfig, TransformerXLConfig, schema
from longspan.data.tokenizers import check_settings
from longspan.models import LanguageModel, build_run
from longspan.optim import build_optimizers
from longspan.registry import CORPORA

BYTES = 256  # where the text decides the vocabulary and nobody has published what it decides

PARAMETERS = {  # with the vocabularies of the originals
    "enwik8": 38_538_541,
    "enwik8-dynamic": 6_488_813,
    "enwik8-large": 208_910_221,
    "enwik8-pers": 114_017_773,
    "enwik8-pers-small": 38_501_725,
    "enwik8-small": 6_480_621,
    "sha-rnn": 63_247_565,
    "sha-rnn-one": 53_773_517,
    "text8": 38_357_116,
    "text8-large": 208_638_172,
    "txl-enwik8": 41_055_436,
    "txl-text8": 40_964_635,
    "txl-wikitext-103": 151_107_538,
    "wiki103-pers": 132_493_746,
}
OURS = {  # docs/architectures.md has them in millions
    "flagship": 44_182_356,
    "flagship-large": 207_459_336,
    "flagship-small": 9_323_776,
    "quickstart": 8_897_216,
    "speedrun": 42_088_350,
}


def on_meta(config: RunConfig) -> LanguageModel:
    tokenizer = config.data.tokenizer
    published = PUBLISHED.get((config.data.corpus, tokenizer.kind), BYTES)
    with torch.device("meta"):
        return build_run(config, tokenizer.vocabulary_size or published)


def num_parameters(config: RunConfig) -> int:
    return sum(parameter.numel() for parameter in on_meta(config).parameters())


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
    assert config.data.corpus in CORPORA
    check_settings(config.data.tokenizer)


def test_it_builds_and_can_be_moved(config: RunConfig) -> None:
    model = on_meta(config)
    assert config.stage
    for stage in config.stage:
        assert build_optimizers(model, stage)


def test_it_is_as_large_as_published(config: RunConfig) -> None:
    """Within 1%, or, where whole millions are coarser than that, so many of them."""
    if "parameters" not in config.expected:
        return
    count, published = num_parameters(config), config.expected["parameters"]
    assert count == pytest.approx(published, rel=0.01) or published == round(count / 1e6) * 10**6


@pytest.mark.parametrize(("name", "count"), (PARAMETERS | OURS).items())
def test_it_has_exactly_so_many_parameters(name: str, count: int) -> None:
    assert num_parameters(schema.read(RunConfig, recipes.load(name))) == count


def test_every_published_size_is_counted() -> None:
    stated = {name for name in recipes.names() if "parameters" in recipes.load(name).get("expected", {})}
    assert stated >= PARAMETERS.keys()


def test_large_ones_are_fine_tuned_at_a_tenth_of_the_rate() -> None:
    for name in ("enwik8-large", "text8-large"):
        main, fine = schema.read(RunConfig, recipes.load(name)).stage
        assert fine.optimizer == main.optimizer == "adagrad"
        assert fine.learning_rate == pytest.approx(main.learning_rate / 10)


def test_what_a_search_finds_is_trained_as_it_was_searched() -> None:
    search = schema.read(RunConfig, recipes.load("wikitext2-par-long-search"))
    found = schema.read(RunConfig, recipes.load("wikitext2-par"))
    assert search.search is not None
    assert isinstance(found.model, TransformerXLConfig)
    assert found.model.pattern is not None
    assert len(found.model.pattern) == search.search.num_blocks
    assert dataclasses.replace(found.model, pattern=None) == search.model
    assert (found.data, found.training, found.evaluation) == (search.data, search.training, search.evaluation)
    assert [dataclasses.replace(stage, name="") for stage in found.stage] == [
        dataclasses.replace(stage, name="") for stage in search.stage
    ]


def test_both_searches_are_of_the_same_size() -> None:
    seed, long = (
        schema.read(RunConfig, recipes.load(name))
        for name in ("wikitext2-par-search", "wikitext2-par-long-search")
    )
    assert isinstance(seed.model, TransformerXLConfig)
    assert dataclasses.replace(seed.model, norm="pre", long_memory_length=128) == long.model
    assert (seed.data, seed.training, seed.evaluation) == (long.data, long.training, long.evaluation)
    assert sum(stage.steps for stage in long.stage) <= sum(stage.steps for stage in seed.stage)


@pytest.mark.parametrize("name", ["enwik8", "text8", "wikitext-103"])
def test_par_is_transformer_xl_with_attention_where_it_is_required(name: str) -> None:
    par, plain = (schema.read(RunConfig, recipes.load(f"{kind}-{name}")).model for kind in ("par", "txl"))
    assert isinstance(par, TransformerXLConfig)
    assert isinstance(plain, TransformerXLConfig)
    assert par.pattern is not None
    assert dataclasses.replace(par, pattern=None, num_layers=plain.num_layers) == plain
    assert len(par.pattern) == 2 * plain.num_layers
    assert par.pattern.count("s") == round(len(par.pattern) / 5)
    assert par.pattern.rindex("s") < len(par.pattern) * 2 / 3
