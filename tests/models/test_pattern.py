"""Stacks by patterns of letters."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from longspan.cli import main
from longspan.config import (
    AdaptiveSpanConfig,
    RunConfig,
    SearchConfig,
    ShaRnnConfig,
    SpanConfig,
    TransformerXLConfig,
)
from longspan.config.model import ModelConfig
from longspan.flops import Shape, flops
from longspan.layers.attention import Attention
from longspan.layers.feed_forward import FeedForward
from longspan.layers.identity import Identity
from longspan.models import build, build_run
from longspan.models.supernet import Supernet
from longspan.registry import ARCHITECTURES

CONFIGS: list[ModelConfig] = [
    AdaptiveSpanConfig(num_layers=2, width=8, num_heads=2, inner_width=12),
    TransformerXLConfig(num_layers=2, width=8, num_heads=2, inner_width=12, memory_length=4),
]


@pytest.fixture(params=CONFIGS, ids=lambda config: ARCHITECTURES.name_of(type(config)))
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return request.param


def test_every_letter_is_its_block(config: ModelConfig) -> None:
    model = build(dataclasses.replace(config, pattern="sffis"), 7)
    kinds = [type(block) for block in model.blocks]
    assert kinds == [Attention, FeedForward, FeedForward, Identity, Attention]
    assert len({id(parameter) for parameter in model.parameters()}) == len(list(model.parameters()))


def test_without_a_pattern_every_layer_is_sf(config: ModelConfig) -> None:
    torch.manual_seed(1)
    plain = build(config, 7).state_dict()
    torch.manual_seed(1)
    spelled = build(dataclasses.replace(config, pattern="sfsf", num_layers=9), 7).state_dict()
    assert plain.keys() == spelled.keys()
    assert all(torch.equal(plain[name], spelled[name]) for name in plain)


def test_identity_changes_nothing(config: ModelConfig) -> None:
    one = build(dataclasses.replace(config, pattern="sf"), 7).eval()
    other = build(dataclasses.replace(config, pattern="isif"), 7).eval()
    rename = {"blocks.0.": "blocks.1.", "blocks.1.": "blocks.3."}
    weights = {
        next((new + name[len(old) :] for old, new in rename.items() if name.startswith(old)), name): value
        for name, value in one.state_dict().items()
    }
    other.load_state_dict(weights)
    tokens = torch.arange(6).view(2, 3)
    assert torch.equal(
        one(tokens, one.initial_state(2))[0],
        other(tokens, other.initial_state(2))[0],
    )


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [("sfx", "pattern 'sfx' has an unknown letter 'x'"), ("", "pattern has no blocks")],
)
def test_bad_patterns_are_one_line(
    pattern: str, complaint: str, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    out = tmp_path / "run"
    assert main(["train", "txl-text8", "--model.pattern", pattern, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert "s (attention), l (long attention), f (feed-forward), i (identity)" in error
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"candidates": "sq"}, "unknown letter 'q'"),
        ({"candidates": "ss"}, "two different letters"),
        ({"candidates": "s"}, "two different letters"),
        ({"num_blocks": 0}, "at least 1"),
        ({"temperature_end": 0.0}, "temperature_end must be between 1e-06 and 1e"),
        ({"temperature_start": 1e30}, "temperature_start must be between"),
        ({"anneal_steps": 0}, "at least 1"),
        ({"cost_weight": -1.0}, "cost_weight must not be negative"),
        ({"warm_up_steps": 5}, 'warm_up_steps has no effect without updates = "alternate"'),
    ],
)
def test_bad_searches_are_refused(options: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        SearchConfig(**options)


def test_long_attention_remembers_more_and_is_no_larger() -> None:
    config = TransformerXLConfig(width=8, num_heads=2, inner_width=12, memory_length=4, long_memory_length=9)
    long, plain = (build(dataclasses.replace(config, pattern=pattern), 7) for pattern in ("lfs", "sfs"))
    remembered = {
        name: leaf.shape[1] for name, leaf in long.initial_state(2).flatten().items() if "memory" in name
    }
    assert remembered == {"blocks.0.memory": 9, "blocks.2.memory": 4}
    assert [p.shape for p in long.parameters()] == [p.shape for p in plain.parameters()]
    assert flops(long.blocks[0], Shape(2, 5)) > flops(long.blocks[2], Shape(2, 5))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"pattern": "lf"}, "pattern 'lf' has long attention, l: give long_memory_length"),
        ({"long_memory_length": 4}, "long_memory_length, 4, must be above memory_length, 4"),
        ({"long_memory_length": 0, "pattern": "lf"}, "long_memory_length, 0, must be above memory_length, 4"),
        (
            {"pattern": "lf", "span": SpanConfig(limit=4)},
            "long attention, l, cannot be combined with a span: leave out one of them",
        ),
        (
            {"long_memory_length": 9, "span": SpanConfig(limit=4)},
            "long_memory_length cannot be combined with a span: leave out one of them",
        ),
    ],
)
def test_long_attention_needs_a_longer_memory(options: dict, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(CONFIGS[1], **options)


def test_learned_spans_need_no_long_attention() -> None:
    with pytest.raises(ValueError, match=r"unknown letter 'l': the letters are s \(attention\), f"):
        dataclasses.replace(CONFIGS[0], pattern="lf")


def test_long_candidates_need_a_long_memory() -> None:
    with pytest.raises(ValueError, match=r"cannot be combined with a span: leave l out of the candidates"):
        RunConfig(model=CONFIGS[0], search=SearchConfig(candidates="slf"))
    with pytest.raises(ValueError, match=r"give model\.long_memory_length"):
        RunConfig(model=CONFIGS[1], search=SearchConfig(candidates="slf"))
    config = dataclasses.replace(CONFIGS[1], long_memory_length=9)
    model = build_run(RunConfig(model=config, search=SearchConfig(candidates="slf")), 7)
    assert isinstance(model, Supernet)
    assert model.costs_K[1] > model.costs_K[0]


def test_a_long_memory_for_nobody() -> None:
    """Refused where no block can have it; a pattern without l may be tried in a recipe that has it."""
    config = dataclasses.replace(CONFIGS[1], long_memory_length=9)
    for search in (None, SearchConfig(candidates="sf")):
        with pytest.raises(ValueError, match=r"model\.long_memory_length has no effect without l"):
            RunConfig(model=config, search=search)
    RunConfig(model=dataclasses.replace(config, pattern="sf", memory_length=9))


def test_a_search_needs_blocks_to_choose() -> None:
    with pytest.raises(ValueError, match="sha-rnn has none"):
        RunConfig(model=ShaRnnConfig(), search=SearchConfig())
    with pytest.raises(ValueError, match=r"leave out model\.pattern"):
        RunConfig(model=dataclasses.replace(CONFIGS[1], pattern="sf"), search=SearchConfig())
