"""Where heads look at the start, how the price of looking far grows, and spans that are frozen."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from longspan.config import AdaptiveSpanConfig, ModernConfig, RunConfig, ShaRnnConfig, SpanConfig, schema
from longspan.errors import UserError
from longspan.layers.learned_span import LearnedSpan, span_penalty
from longspan.layers.span import FixedSpan, rounded_up
from longspan.models import build
from longspan.models.windows import with_frozen_spans

MODERN = ModernConfig(num_layers=2, width=8, num_heads=2, inner_width=12, span=SpanConfig(limit=40, ramp=3))


def test_sizes_are_rounded_up_to_steps_that_grow() -> None:
    assert [rounded_up(length) for length in (1, 16, 17, 240, 256)] == [16, 16, 32, 240, 256]
    assert [rounded_up(length) for length in (257, 513, 5033, 8192)] == [288, 576, 5120, 8192]
    assert all(length <= rounded_up(length) < length + max(16, length / 8) for length in range(1, 9000))


class TestLimits:
    def test_in_geometric_steps(self) -> None:
        span = LearnedSpan(4, 640, limit_shortest=10, ramp=1, start=0.5)
        assert span.limits == (10, 40, 160, 640)
        assert span.caps == (12, 42, 162, 640)  # with the ramp, and one beyond
        torch.testing.assert_close(span().detach(), torch.tensor([5.0, 20.0, 80.0, 320.0]))
        assert span.sizes_H().tolist() == [6, 21, 81, 321]
        assert span.windows == (16, 32, 96, 352)  # the sizes follow before the first update
        with torch.no_grad():
            span.fraction_H.fill_(1.0)
        assert span.sizes_H().tolist() == [11, 41, 161, 640]

    def test_the_penalty_counts_tokens(self) -> None:
        span = LearnedSpan(4, 640, limit_shortest=10, start=0.5, penalty=0.01)
        span_penalty([span]).backward()
        torch.testing.assert_close(span_penalty([span]), torch.tensor(0.01 * (5 + 20 + 80 + 320) / 4))
        torch.testing.assert_close(span_penalty([span, span]), 2 * span_penalty([span]))
        torch.testing.assert_close(span.fraction_H.grad, 0.01 / 4 * torch.tensor([10.0, 40.0, 160.0, 640.0]))

    def test_all_alike(self) -> None:
        assert LearnedSpan(3, 80, start=0.25).limits == (80,) * 3
        assert LearnedSpan(1, 80, limit_shortest=8, start=0.25).limits == (80,)

    @pytest.mark.parametrize(
        "options",
        [{"limit_shortest": 0}, {"limit_shortest": 1025}, {"per": "layer"}, {"kind": "fixed"}],
        ids=str,
    )
    def test_what_cannot_be_spread_is_refused(self, options: dict) -> None:
        with pytest.raises(ValueError, match="limit_shortest"):
            SpanConfig(**{"limit_shortest": 8} | options)


class TestPenalty:
    def weights(self, **options: int) -> list[float]:
        """The penalty of a model before each of eight updates."""
        span = SpanConfig(limit=100, ramp=3, start=0.5, penalty=0.02, **options)
        model = build(dataclasses.replace(MODERN, span=span), 5)
        found = []
        for _ in range(8):
            found.append(round(model.penalties()["span"].item(), 6))
            model.after_update()
        return found

    def test_it_sets_in_and_grows(self) -> None:
        assert self.weights() == [2] * 8
        assert self.weights(penalty_full=4) == [0.4, 0.8, 1.2, 1.6, 2, 2, 2, 2]
        assert self.weights(penalty_from=3) == [0, 0, 0, 2, 2, 2, 2, 2]
        assert self.weights(penalty_from=2, penalty_full=5) == [0, 0, 0.5, 1, 1.5, 2, 2, 2]

    def test_it_goes_on_where_it_was(self) -> None:
        config = dataclasses.replace(
            MODERN, span=SpanConfig(limit=100, ramp=3, start=0.5, penalty=0.02, penalty_full=9)
        )
        model, twin = build(config, 5), build(config, 5)
        for _ in range(3):
            model.after_update()
        twin.load_state_dict(model.state_dict())
        assert twin.penalties()["span"].item() == model.penalties()["span"].item() == pytest.approx(0.8)

    def test_one_that_does_not_grow_adds_nothing_to_a_checkpoint(self) -> None:
        assert not any("updates" in name for name in build(MODERN, 5).state_dict())

    def test_an_end_before_the_beginning_is_refused(self) -> None:
        with pytest.raises(ValueError, match="penalty_full below"):
            SpanConfig(penalty_from=5, penalty_full=4)


class TestWindows:
    WINDOWS = ((3, 20), (7, 7))
    SPAN = SpanConfig(kind="fixed", limit=40, windows=WINDOWS)

    @pytest.mark.parametrize(
        "config",
        [MODERN, AdaptiveSpanConfig(num_layers=2, width=8, num_heads=2, inner_width=12)],
        ids=["modern", "adaptive-span"],
    )
    def test_every_head_has_its_own(self, config: ModernConfig | AdaptiveSpanConfig) -> None:
        model = build(dataclasses.replace(config, span=self.SPAN), 5)
        spans = [module for module in model.modules() if isinstance(module, FixedSpan)]
        assert tuple(span.windows_for(9) for span in spans) == self.WINDOWS
        assert [span.memory_length for span in spans] == [20, 7]

    @pytest.mark.parametrize("memory", ["hidden", "keys-values"])
    @pytest.mark.parametrize(("head", "window"), [(0, 3), (1, 20)])
    def test_nothing_further_back_counts(self, memory: str, head: int, window: int) -> None:
        config = dataclasses.replace(MODERN, span=self.SPAN, num_layers=2, memory=memory)
        block = build(config, 5).double().blocks[0]
        with torch.no_grad():
            block.out.weight[:, head * 4 : head * 4 + 4].normal_()  # all others stay at zero
        x = torch.randn(1, 30, 8, dtype=torch.float64)
        other = x.clone()
        other[:, 5] += 1
        with torch.no_grad():
            whole, changed = (block(h, block.initial_state(1))[0] for h in (x, other))
        moved = (whole != changed).any(-1)[0].nonzero().flatten().tolist()
        assert moved == list(range(5, 5 + window))

    def test_it_is_written_and_read(self) -> None:
        config = RunConfig(model=dataclasses.replace(MODERN, span=self.SPAN))
        assert RunConfig.from_toml(config.to_toml().encode(), "here") == config

    @pytest.mark.parametrize("windows", [((3, 20),), ((3, 20), (7,)), ((3, 20, 4), (7, 7, 4))])
    def test_windows_of_another_model_are_refused(self, windows: tuple) -> None:
        span = SpanConfig(kind="fixed", limit=40, windows=windows)
        with pytest.raises(UserError, match="windows"):
            build(dataclasses.replace(MODERN, span=span), 5)

    @pytest.mark.parametrize("table", [{"windows": [[3]]}, {"kind": "fixed", "windows": [[41]], "limit": 40}])
    def test_impossible_windows_are_refused(self, table: dict) -> None:
        with pytest.raises(UserError, match="window"):
            schema.read(SpanConfig, table)


class TestFreezing:
    def test_what_was_learned_becomes_windows(self) -> None:
        model = build(MODERN, 5)
        with torch.no_grad():
            model.blocks[0].span.fraction_H.copy_(torch.tensor([0.25, 0.5]))
            model.blocks[2].span.fraction_H.copy_(torch.tensor([0.0, 1.0]))
        model.after_update()
        config = with_frozen_spans(MODERN, model)
        assert config.span == SpanConfig(kind="fixed", limit=40, windows=((13, 23), (3, 40)))
        frozen = build(config, 5)
        left = model.state_dict().keys() - frozen.state_dict().keys()
        assert {name.rpartition(".")[2] for name in left} == {"fraction_H"}
        assert not frozen.state_dict().keys() - model.state_dict().keys()

    def test_it_reads_as_the_learned_one_where_no_edge_is_soft(self) -> None:
        span = SpanConfig(limit=6, ramp=3, start=1.0)  # at the limit nothing is seen in part
        config = dataclasses.replace(MODERN, span=span)
        model = build(config, 5).double()
        for block in model.blocks[::2]:
            torch.nn.init.normal_(block.out.weight)
        frozen = build(with_frozen_spans(config, model), 5).double()
        frozen.load_state_dict({n: w for n, w in model.state_dict().items() if not n.endswith("fraction_H")})
        tokens = torch.randint(5, (2, 17))
        found, expected = (m(tokens, m.initial_state(2))[0] for m in (frozen, model))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)

    def test_spans_without_renormalisation_cannot_be_frozen(self) -> None:
        span = SpanConfig(renormalise=False, softmax_over="layer")
        config = AdaptiveSpanConfig(num_layers=1, width=8, num_heads=2, inner_width=8, span=span)
        with pytest.raises(UserError, match="renormalise = false cannot be frozen"):
            with_frozen_spans(config, build(config, 5))

    def test_without_spans_there_is_nothing_to_freeze(self) -> None:
        sha_rnn = ShaRnnConfig(num_layers=2, width=8, inner_width=8)
        with pytest.raises(UserError, match="nothing to freeze"):
            with_frozen_spans(sha_rnn, build(sha_rnn, 5))
