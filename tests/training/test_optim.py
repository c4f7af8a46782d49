"""Optimizers and schedules against what their formulas say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from longspan.config import AdaptiveSpanConfig, ModernConfig, ShaRnnConfig, StageConfig
from longspan.errors import UserError
from longspan.models import build
from longspan.optim import (
    Adagrad,
    Muon,
    build_optimizers,
    done,
    fraction,
    memories,
    restore_memories,
    set_rate,
)
from longspan.optim.groups import group_of_parameters
from longspan.optim.polar import orthogonal
from longspan.registry import ARCHITECTURES

from .tiny import TinyModel


def stage(**settings: Any) -> StageConfig:
    return StageConfig(**{"steps": 100, "learning_rate": 0.5, **settings})


class TestAdagrad:
    @pytest.mark.parametrize("clip", [0.0, 0.3])
    def test_it_follows_the_formula(self, clip: float) -> None:
        generator = torch.Generator().manual_seed(3)
        shapes = [(4, 3), (5,), (), (2, 1, 2)]
        values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        parameters = [nn.Parameter(v.clone()) for v in values]
        optimizer = Adagrad(parameters, lr=0.07, clip=clip)
        sums = [torch.zeros_like(v) for v in values]
        for step in range(4):
            for i, p in enumerate(parameters):
                # Norms on both sides of the clip, so that both branches are taken.
                g = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.1 ** ((step + i) % 3)
                p.grad = g
                sums[i] = sums[i] + g * g
                n = g.norm()
                rate = 0.07 * clip / (n + 1e-10) if clip > 0 and n > clip else 0.07
                values[i] = values[i] - rate * g / (sums[i].sqrt() + 1e-10)
            optimizer.step()
        for p, v in zip(parameters, values, strict=True):
            torch.testing.assert_close(p.detach(), v, rtol=1e-12, atol=1e-14)
        for p, total in zip(parameters, sums, strict=True):
            assert list(optimizer.state[p]) == ["sum"]
            torch.testing.assert_close(optimizer.state[p]["sum"], total)

    def test_a_tensor_without_gradient_stays(self) -> None:
        moved, still = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        moved.grad = torch.ones(2)
        optimizer = Adagrad([moved, still], lr=0.5)
        optimizer.step()
        assert moved.tolist() == [0.5, 0.5]
        assert still.tolist() == [1.0, 1.0]
        assert still not in optimizer.state


class TestMuon:
    SHAPES = ((6, 4), (4, 6), (6, 4), (5, 5), (6, 4))

    def matrices(self) -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(2)
        return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in self.SHAPES]

    def test_it_moves_as_torch_does(self) -> None:
        ours, theirs = self.matrices(), self.matrices()
        muon = Muon(ours, lr=0.1, momentum=0.9, weight_decay=0.2)
        other = torch.optim.Muon(
            theirs, lr=0.1, momentum=0.9, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
        )
        generator = torch.Generator().manual_seed(4)
        for _ in range(3):
            for p, q in zip(ours, theirs, strict=True):
                p.grad = torch.randn(p.shape, generator=generator) * 1e-3
                q.grad = p.grad.clone()
            muon.step()
            other.step()
        for p, q in zip(ours, theirs, strict=True):  # torch's is in bfloat16
            torch.testing.assert_close(p, q, rtol=0.02, atol=0.02)
            torch.testing.assert_close(muon.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"])

    def test_it_follows_the_formula(self) -> None:
        values = [p.detach().double() for p in self.matrices()]
        parameters = [nn.Parameter(v.clone()) for v in values]
        optimizer = Muon(parameters, lr=0.1, momentum=0.9, weight_decay=0.2)
        means = [torch.zeros_like(v) for v in values]
        for _ in range(2):
            for i, p in enumerate(parameters):
                p.grad = torch.randn_like(p)
                means[i] = 0.9 * means[i] + 0.1 * p.grad
                x = 0.1 * p.grad + 0.9 * means[i]
                x = x / x.norm()
                for _ in range(5):
                    xxt = x @ x.T
                    x = 3.4445 * x - 4.775 * xxt @ x + 2.0315 * xxt @ xxt @ x
                values[i] = values[i] * (1 - 0.1 * 0.2) - 0.1 * 0.2 * math.sqrt(max(p.shape)) * x
            optimizer.step()
        for p, v in zip(parameters, values, strict=True):
            torch.testing.assert_close(p.detach(), v, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("shape", [(3, 20, 8), (2, 8, 20), (1, 7, 7)])
    def test_all_singular_values_come_near_one(self, shape: tuple[int, ...]) -> None:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        left, _, right = torch.linalg.svd(x, full_matrices=False)
        found = torch.linalg.svdvals(orthogonal(x))
        assert found.min() > 0.4
        assert found.max() < 1.3
        inner = left.mT @ orthogonal(x) @ right.mT  # its singular vectors are those of x
        torch.testing.assert_close(inner, torch.diag_embed(inner.diagonal(dim1=1, dim2=2)))

    def test_zeros_stay_and_spoil_nobody(self) -> None:
        x = torch.stack([torch.zeros(3, 4), torch.eye(3, 4)])
        assert torch.equal(orthogonal(x)[0], torch.zeros(3, 4))
        assert torch.equal(orthogonal(x)[1], orthogonal(x[1:])[0])

    def test_a_matrix_without_gradient_stays(self) -> None:
        moved, still = self.matrices()[0], self.matrices()[2]
        before = still.detach().clone()
        moved.grad = torch.ones_like(moved)
        optimizer = Muon([moved, still], lr=0.1)
        optimizer.step()
        assert torch.equal(still, before)
        assert list(optimizer.state) == [moved]


class TestSchedules:
    def test_trapezoid_falls_on_a_straight_line_at_the_end(self) -> None:
        shape = stage(schedule="trapezoid", warmup_steps=4, cooldown=0.2, final_fraction=0.1)
        assert [fraction(shape, t) for t in (1, 2, 4, 40, 81)] == pytest.approx([0.25, 0.5, 1, 1, 1])
        assert [fraction(shape, t) for t in (91, 96, 101)] == pytest.approx([0.55, 0.325, 0.1])

    def test_one_minus_sqrt_falls_quickly_at_first(self) -> None:
        shape = stage(schedule="one-minus-sqrt", cooldown=0.4)
        assert [fraction(shape, t) for t in (1, 61, 71, 101)] == pytest.approx([1, 1, 0.5, 0])

    def test_a_cool_down_follows_the_clock(self) -> None:
        timed = stage(schedule="trapezoid", cooldown=0.5, max_seconds=60.0)
        assert [fraction(timed, 1, t) for t in (0.0, 30.0, 45.0, 60.0)] == pytest.approx([1, 1, 0.5, 0])

    def test_a_cool_down_of_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="cooldown must be above 0"):
            stage(schedule="trapezoid", cooldown=0.0)
        with pytest.raises(ValueError, match="cooldown"):
            stage(schedule="cosine", cooldown=0.2)

    def test_warm_up_is_t_over_warmup_counted_from_one(self) -> None:
        warm = stage(warmup_steps=4)
        assert [fraction(warm, t) for t in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]

    def test_constant_without_warm_up(self) -> None:
        assert {fraction(stage(), t) for t in (1, 50, 100)} == {1.0}

    def test_cosine_goes_from_one_to_the_final_fraction(self) -> None:
        cosine = stage(schedule="cosine", final_fraction=0.2)
        assert fraction(cosine, 1) == 1.0
        assert fraction(cosine, 51) == pytest.approx(0.6, abs=1e-15)
        assert fraction(cosine, 101) == pytest.approx(0.2, abs=1e-15)
        assert fraction(cosine, 500) == pytest.approx(0.2, abs=1e-15)

    def test_cosine_follows_the_clock_when_that_is_further_on(self) -> None:
        timed = stage(schedule="cosine", max_seconds=60.0)
        assert fraction(timed, 1, 30.0) == pytest.approx(0.5)
        assert fraction(timed, 51, 6.0) == pytest.approx(0.5)
        assert fraction(timed, 1, 90.0) == pytest.approx(0.0)

    def test_a_stage_is_done_by_steps_or_by_time(self) -> None:
        timed = stage(max_seconds=60.0)
        assert [done(timed, n, t) for n, t in ((0, 0.0), (50, 6.0), (5, 30.0))] == [0.0, 0.5, 0.5]
        assert done(timed, 100, 0.0) == done(timed, 0, 60.0) == done(timed, 101, 99.0) == 1.0
        assert done(stage(), 50, 1e9) == 0.5

    def test_inverse_square_root_after_warm_up(self) -> None:
        decaying = stage(schedule="inverse-sqrt", warmup_steps=4)
        assert fraction(decaying, 2) == 0.5
        assert fraction(decaying, 4) == 1.0
        assert fraction(decaying, 16) == 0.5
        assert fraction(stage(schedule="inverse-sqrt"), 9) == pytest.approx(1 / 3)

    def test_warm_up_multiplies_the_cosine(self) -> None:
        both = stage(schedule="cosine", warmup_steps=10)
        assert fraction(both, 5) == pytest.approx(0.5 * (1 + math.cos(math.pi * 4 / 100)) / 2)


class TestBuild:
    @pytest.mark.parametrize("kind", ["adagrad", "adam", "adamw", "sgd", "muon", "normuon"])
    def test_every_parameter_is_held_once_and_moves(self, kind: Any) -> None:
        torch.manual_seed(0)
        model = TinyModel()
        optimizers = build_optimizers(model, stage(optimizer=kind, learning_rate=0.01))
        held = [id(p) for o in optimizers for g in o.param_groups for p in g["params"]]
        assert sorted(held) == sorted(id(p) for p in model.parameters())
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        for optimizer in optimizers:
            optimizer.step()
        assert all(not torch.equal(before[n], p) for n, p in model.named_parameters())

    @pytest.mark.parametrize("kind", ["adamw", "muon"])
    @pytest.mark.parametrize(
        "config",
        [
            ModernConfig(num_layers=2, width=8, num_heads=2, inner_width=16, tied=True),
            ModernConfig(num_layers=1, width=8, num_heads=2, inner_width=16, feed_forward="swiglu"),
            ShaRnnConfig(num_layers=2, width=8, inner_width=16),
        ],
        ids=lambda config: ARCHITECTURES.name_of(type(config)),
    )
    def test_groups_add_up_to_the_model(self, kind: Any, config: Any) -> None:
        model = build(config, 11)
        optimizers = build_optimizers(model, stage(optimizer=kind, weight_decay=0.1))
        groups = [g for o in optimizers for g in o.param_groups]
        held = [p for g in groups for p in g["params"]]
        assert len(held) == len({id(p) for p in held})
        assert {id(p) for p in held} == {id(p) for p in model.parameters()}
        names = {id(p): n for n, p in model.named_parameters()}
        decayed = {names[id(p)] for g in groups if g["weight_decay"] > 0 for p in g["params"]}
        assert decayed == {n for n, p in model.blocks.named_parameters(prefix="blocks") if p.ndim == 2}

    def test_an_output_layer_with_a_table_of_its_own_is_the_head(self) -> None:
        model = build(ShaRnnConfig(num_layers=2, width=8, inner_width=16, tied=False), 300)
        groups = {name: group_of_parameters(model)[p] for name, p in model.named_parameters()}
        found = [groups[name] for name in ("embedding.weight", "head.table.weight", "head.bias_V")]
        assert found == ["embedding", "head", "head"]

    def test_only_matrices_of_blocks_decay(self) -> None:
        model = TinyModel()
        optimizers = build_optimizers(model, stage(optimizer="adamw", weight_decay=0.1))
        names = {id(p): n for n, p in model.named_parameters()}
        groups = [g for o in optimizers for g in o.param_groups]
        decayed = {names[id(p)] for g in groups if g["weight_decay"] > 0 for p in g["params"]}
        assert decayed == {"mix.weight", "keep.weight"}

    @pytest.mark.parametrize("kind", ["adam", "adamw", "lamb", "sgd", "muon", "normuon"])
    @pytest.mark.parametrize("span_rate", [None, 0.1])
    def test_all_parameters_decay_if_asked(self, kind: Any, span_rate: float | None) -> None:
        wanted = stage(optimizer=kind, weight_decay=0.1, weight_decay_of="all", span_learning_rate=span_rate)
        groups = [g for o in build_optimizers(TinyModel(), wanted) for g in o.param_groups]
        assert {g["weight_decay"] for g in groups} == {0.1}

    def test_decay_of_all_reaches_a_bias(self) -> None:
        """SGD with a gradient of 0: p becomes (1 - rate * decay) p where p decays."""
        for of, expected in (("all", 0.95), ("matrices", 1.0)):
            model = TinyModel()
            (sgd,) = build_optimizers(model, stage(optimizer="sgd", weight_decay=0.1, weight_decay_of=of))
            before = model.mix.bias.detach().clone()
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            sgd.step()
            torch.testing.assert_close(model.mix.bias.detach(), expected * before)

    def test_adagrad_has_no_decay_to_choose(self) -> None:
        with pytest.raises(ValueError, match="weight_decay_of has no effect with optimizer adagrad"):
            stage(optimizer="adagrad", weight_decay_of="all")

    def test_muon_moves_matrices_and_adamw_the_rest_at_its_own_rate(self) -> None:
        settings = stage(optimizer="muon", learning_rate=0.02, adamw_learning_rate=0.001, momentum=0.95)
        muon, adamw = build_optimizers(TinyModel(), settings)
        assert isinstance(muon, Muon)
        assert isinstance(adamw, torch.optim.AdamW)
        set_rate([muon, adamw], 0.5)
        assert {g["lr"] for g in muon.param_groups} == {0.01}
        assert {g["lr"] for g in adamw.param_groups} == {0.0005}
        assert all(g["momentum"] == 0.95 for g in muon.param_groups)

    @pytest.mark.parametrize("kind", ["adagrad", "adamw", "muon", "lamb", "sgd"])
    def test_spans_can_have_a_rate_of_their_own(self, kind: Any) -> None:
        model = build(AdaptiveSpanConfig(num_layers=1, width=8, num_heads=2, inner_width=8), 5)
        optimizers = build_optimizers(
            model, stage(optimizer=kind, learning_rate=0.1, span_learning_rate=0.002)
        )
        names = {id(p): n for n, p in model.named_parameters()}
        peaks = {names[id(p)]: g["peak"] for o in optimizers for g in o.param_groups for p in g["params"]}
        assert peaks.keys() == set(names.values())
        assert {n for n, peak in peaks.items() if peak == 0.002} == {"blocks.0.span.fraction_H"}

    @pytest.mark.parametrize(("kind", "momentum"), [("muon", 0.95), ("normuon", 0.95), ("sgd", 0.0)])
    def test_momentum_that_is_not_given(self, kind: Any, momentum: float) -> None:
        for given, expected in ((None, momentum), (0.0, 0.0), (0.5, 0.5)):
            first, *_ = build_optimizers(TinyModel(), stage(optimizer=kind, momentum=given))
            assert {g["momentum"] for g in first.param_groups} == {expected}

    def test_a_rate_of_zero_is_a_rate(self) -> None:
        still = stage(optimizer="muon", adamw_learning_rate=0.0)
        _, adamw = build_optimizers(TinyModel(), still)
        assert {g["peak"] for g in adamw.param_groups} == {0.0}
        _, same = build_optimizers(TinyModel(), stage(optimizer="muon"))
        assert {g["peak"] for g in same.param_groups} == {0.5}

    def test_adagrad_groups_hold_nothing_that_it_does_not_use(self) -> None:
        (adagrad,) = build_optimizers(TinyModel(), stage(optimizer="adagrad"))
        assert [set(group) for group in adagrad.param_groups] == [{"params", "lr", "clip", "peak"}]

    def test_adam_uses_the_given_betas(self) -> None:
        (adam,) = build_optimizers(TinyModel(), stage(optimizer="adam", beta1=0.8, beta2=0.95))
        assert {g["betas"] for g in adam.param_groups} == {(0.8, 0.95)}

    def test_muon_without_matrices_says_so(self) -> None:
        model = TinyModel()
        model.mix.requires_grad_(False)
        model.keep.requires_grad_(False)
        for kind in ("muon", "normuon"):
            with pytest.raises(UserError, match=f"^{kind} needs matrices .*: use adamw"):
                build_optimizers(model, stage(optimizer=kind))


class TestMemories:
    @pytest.mark.parametrize(
        ("kind", "kept"),
        [
            ("adagrad", {"sum"}),
            ("adam", {"step", "exp_avg", "exp_avg_sq"}),
            ("sgd", {"momentum_buffer"}),
            ("muon", {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}),
            ("normuon", {"momentum_buffer", "line_moment", "step", "exp_avg", "exp_avg_sq"}),
        ],
    )
    def test_they_go_from_optimizer_to_optimizer_by_name(self, kind: Any, kept: set[str]) -> None:
        model = TinyModel()
        momentum = {"momentum": 0.9} if kind in ("sgd", "muon", "normuon") else {}
        settings = stage(optimizer=kind, learning_rate=0.01, **momentum)

        def step(optimizers: list[torch.optim.Optimizer]) -> None:
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.1)
            for optimizer in optimizers:
                optimizer.step()

        old = build_optimizers(model, settings)
        step(old)
        remembered = {name: tensor.clone() for name, tensor in memories(model, old).items()}
        assert {name.rpartition(".")[2] for name in remembered} == kept
        assert {name.rpartition(".")[0] for name in remembered} == dict(model.named_parameters()).keys()

        new = build_optimizers(model, stage(optimizer=kind, learning_rate=0.001, **momentum))
        restore_memories(model, new, remembered)
        again = memories(model, new)
        assert all(torch.equal(again[name], tensor) for name, tensor in remembered.items())
        assert {group["peak"] for optimizer in new for group in optimizer.param_groups} == {0.001}
        step(new)
