"""Windows and limits that grow in the course of a training: what heads see, remember and learn."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.config import AdaptiveSpanConfig, GptConfig, ModernConfig, RunConfig, SpanConfig
from longspan.layers.dynamic_span import DynamicSpan
from longspan.layers.growth import Growth
from longspan.layers.learned_span import LearnedSpan
from longspan.layers.span import FixedSpan
from longspan.models import LanguageModel, build
from longspan.testing import check_model

PARTS = (0.25, 0.5, 1.0)
FIXED = SpanConfig(kind="fixed", limit=96, windows=((96, 20), (64, 96)), growth=PARTS)
LEARNED = SpanConfig(limit=96, ramp=4, start=0.75, penalty=0.01, growth=PARTS)
SIZES: dict[str, Any] = {"num_layers": 2, "width": 8, "num_heads": 2, "inner_width": 12}


def models() -> dict[str, LanguageModel]:
    configs = {
        "modern, fixed": ModernConfig(**SIZES, span=FIXED),
        "modern, fixed, keys and values": ModernConfig(**SIZES, span=FIXED, memory="keys-values"),
        "modern, learned": ModernConfig(**SIZES, span=LEARNED),
        "modern, learned, keys and values": ModernConfig(**SIZES, span=LEARNED, memory="keys-values"),
        "modern, dynamic": ModernConfig(**SIZES, span=dataclasses.replace(LEARNED, kind="dynamic")),
        "adaptive-span": AdaptiveSpanConfig(**SIZES, span=dataclasses.replace(LEARNED, softmax_over="layer")),
        "gpt": GptConfig(**SIZES, context=96, span=dataclasses.replace(LEARNED, limit=96)),
    }
    return {name: build(config, 5) for name, config in configs.items()}


class TestParts:
    def test_one_after_the_other(self) -> None:
        growth, found = Growth(PARTS), []
        for step in range(31):
            growth.follow(step / 30)
            found.append(growth.part)
            assert float(growth.seen) == growth.part
        assert found == [0.25] * 10 + [0.5] * 10 + [1.0] * 11

    @pytest.mark.parametrize("number", [3, 7, 49])
    def test_the_border_belongs_to_the_next_part(self, number: int) -> None:
        growth = Growth([i / number for i in range(1, number + 1)])
        for i in range(number):
            growth.follow(1 / number * i)
            assert growth.part == (i + 1) / number

    def test_all_is_seen_without_a_training(self) -> None:
        assert Growth(PARTS).part == 1.0
        assert not any("seen" in name for name in build(ModernConfig(**SIZES, span=LEARNED), 5).state_dict())


class TestFixed:
    def test_windows_are_cut_and_memory_is_not(self) -> None:
        span = FixedSpan(3, 96, PARTS)
        span.set_windows((96, 20, 5))
        found = []
        for done in (0.0, 0.4, 0.7):
            span.progress(done)
            found.append(span.windows_for(9))
            assert (span.caps, span.memory_length) == ((96, 20, 5), 96)
        assert found == [(32, 16, 5), (48, 16, 5), (96, 20, 5)]  # in steps of 16

    @pytest.mark.parametrize("memory", ["hidden", "keys-values"])
    @pytest.mark.parametrize(("done", "window"), [(0.0, 32), (0.34, 48), (1.0, 96)])
    def test_a_head_sees_as_far_as_its_window(self, memory: Any, done: float, window: int) -> None:
        """In the block and, after two thirds of it, in the memory."""
        config = ModernConfig(**SIZES | {"num_layers": 1}, memory=memory)
        span = SpanConfig(kind="fixed", limit=96, growth=PARTS)
        model = build(dataclasses.replace(config, span=span), 5).double()
        torch.nn.init.normal_(model.blocks[0].out.weight)
        model.progress(done)
        tokens = torch.ones(1, 120, dtype=torch.long)
        other = tokens.clone()
        other[0, 7] = 2

        def read(ids: Tensor) -> Tensor:
            with torch.no_grad():
                near, state = model(ids[:, :40], model.initial_state(1))
                return torch.cat([near, model(ids[:, 40:], state)[0]], dim=1)

        moved = (read(tokens) != read(other)).any(-1)[0].nonzero().flatten().tolist()
        assert moved == list(range(7, 7 + window))


class TestLearned:
    def test_spans_are_cut_and_memory_is_not(self) -> None:
        span = LearnedSpan(2, 512, ramp=4, growth=PARTS)
        with torch.no_grad():
            span.fraction_H.copy_(torch.tensor([0.125, 0.75]))
        span.clamp_()
        found = []
        for done in (0.0, 0.4, 0.7):
            span.progress(done)
            found.append((span().tolist(), span.windows, span.sizes_H().tolist()))
            assert span.memory_length == 512
        assert found == [
            ([64, 128], (80, 144), [68, 132]),
            ([64, 256], (80, 288), [68, 260]),
            ([64, 384], (80, 416), [68, 388]),
        ]
        assert span.fraction_H.tolist() == [0.125, 0.75]

    def test_sizes_that_arrive_later_are_cut_too(self) -> None:
        span = LearnedSpan(1, 96, ramp=4, growth=PARTS)
        span.progress(0.0)
        span.set_fractions([1.0])
        assert (span.windows, span.memory_length) == ((32,), 96)

    @pytest.mark.parametrize("over", ["head", "layer"])
    def test_it_reads_as_spans_that_are_that_short(self, over: Any) -> None:
        config = ModernConfig(**SIZES, span=dataclasses.replace(LEARNED, softmax_over=over))
        model = build(config, 5).double()
        for block in model.blocks[::2]:
            torch.nn.init.normal_(block.out.weight)
        short = dataclasses.replace(config, span=dataclasses.replace(config.span, start=0.25, growth=()))
        twin = build(short, 5).double()
        twin.load_state_dict(
            {n: w for n, w in model.state_dict().items() if "fraction" not in n}, strict=False
        )
        model.progress(0.2)
        tokens, found = torch.randint(5, (2, 120)), []
        for each in (model, twin):
            near, state = each(tokens[:, :50], each.initial_state(2))
            found.append(torch.cat([near, each(tokens[:, 50:], state)[0]], dim=1))
        torch.testing.assert_close(*found)

    def test_only_spans_that_are_not_cut_get_a_gradient(self) -> None:
        model = build(ModernConfig(**SIZES | {"num_layers": 1}, span=LEARNED), 5).double()
        (span,) = (module for module in model.modules() if isinstance(module, LearnedSpan))
        torch.nn.init.normal_(model.blocks[0].out.weight)
        found = []
        for done in (0.0, 0.5, 1.0):
            with torch.no_grad():
                span.fraction_H.copy_(torch.tensor([0.5, 0.75]))
            model.refresh()
            model.progress(done)
            model.zero_grad()
            hidden, _ = model(torch.randint(5, (2, 90)), model.initial_state(2))
            (hidden.square().sum() + sum(model.penalties().values())).backward()
            found.append([value != 0 for value in span.fraction_H.grad.tolist()])
        assert found == [[False, False], [True, False], [True, True]]  # a span at the border is not cut

    def test_the_penalty_is_on_what_is_seen(self) -> None:
        span = LearnedSpan(2, 100, start=0.5, penalty=0.01, growth=PARTS)
        other = LearnedSpan(2, 100, start=0.5, penalty=0.01)
        span.progress(0.0)
        torch.testing.assert_close(LearnedSpan.penalties_of([span, other])["span"], torch.tensor(0.75))
        span.penalty().backward()
        assert span.fraction_H.grad.tolist() == [0, 0]


def test_dynamic_spans_are_cut() -> None:
    span = DynamicSpan(3, 2, 100, start=0.5, growth=PARTS)
    torch.nn.init.normal_(span.direction_HD, std=3.0)
    x_BTD = torch.randn(2, 50, 3)
    whole = span(x_BTD)
    span.progress(0.0)
    assert torch.equal(span(x_BTD), whole.clamp(max=25.0))
    assert whole.max() > 60


@pytest.mark.parametrize("name", models())
def test_models_keep_the_rules_while_they_grow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models()[name]
    for block in model.modules():
        if (out := getattr(block, "out", None)) is not None:
            torch.nn.init.normal_(out.weight, std=0.3)
    state = model.initial_state(2).flatten()
    whole_key = model.shape_key(model.initial_state(2))
    model.progress(0.0)
    now = model.initial_state(2)
    assert {n: leaf.shape for n, leaf in now.flatten().items()} == {n: x.shape for n, x in state.items()}
    # The windows of dynamic spans are known only on the device.
    assert (model.shape_key(now) != whole_key) == ("dynamic" not in name)
    monkeypatch.setattr(type(model), "progress", lambda self, done: None)  # a rule would let it grow
    check_model(model)


class TestOptions:
    @pytest.mark.parametrize(
        ("growth", "words"),
        [
            ((0.5,), "the last fraction of growth must be 1, not 0.5"),
            ((0.5, 1.0, 1.5), "the last fraction of growth must be 1, not 1.5"),
            ((0.0, 1.0), "growth must hold fractions above 0"),
            ((0.5, 0.25, 1.0), "none below the one before it"),
            ((float("nan"), 1.0), "growth must hold fractions above 0"),
        ],
    )
    def test_mistakes(self, growth: tuple[float, ...], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            SpanConfig(growth=growth)

    def test_it_is_written_and_read(self) -> None:
        config = RunConfig(model=ModernConfig(**SIZES, span=LEARNED))
        assert RunConfig.from_toml(config.to_toml().encode(), "here") == config
