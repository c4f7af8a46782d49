"""Options of a stage that reach optimizers: rates of groups, epsilon, momentum and decay over the stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from longspan.config import AdaptiveSpanConfig, ModernConfig, StageConfig, VocabularyConfig
from longspan.models import build
from longspan.models.interface import LanguageModel
from longspan.optim import (
    NorMuon,
    build_optimizers,
    memories,
    momentum,
    restore_memories,
    set_rate,
    undeclared_notice,
)
from longspan.training import train

from .runs import metrics, small_config
from .tiny import TinyModel

RATES = {"embedding_learning_rate": 0.03, "head_learning_rate": 0.004, "scalar_learning_rate": 0.005}


def stage(**settings: Any) -> StageConfig:
    return StageConfig(**{"steps": 100, "learning_rate": 0.01, **settings})


def modern(**options: Any) -> LanguageModel:
    sizes = {"num_layers": 1, "width": 8, "num_heads": 2, "inner_width": 16}
    return build(ModernConfig(**{**sizes, **options}), 5)


def peaks(model: LanguageModel, **settings: Any) -> dict[str, float]:
    """The peak rate of every parameter."""
    names = {p: name for name, p in model.named_parameters()}
    optimizers = build_optimizers(model, stage(**settings))
    return {names[p]: g["peak"] for o in optimizers for g in o.param_groups for p in g["params"]}


class Gated(TinyModel):
    """With a learned scalar, and a gate that is declared as one."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.tensor(0.5))
        self.gate = nn.Linear(3, 2, bias=False)

    def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"scalar": [self.gate.weight]}


class TestRates:
    @pytest.mark.parametrize("kind", ["adagrad", "adam", "adamw", "lamb", "sgd", "muon", "normuon"])
    def test_each_group_has_its_own(self, kind: str) -> None:
        found = peaks(Gated(), optimizer=kind, **RATES)
        assert found.keys() == {name for name, _ in Gated().named_parameters()}
        special = {name: rate for name, rate in found.items() if rate != 0.01}
        assert special == {
            "embedding.weight": 0.03,
            "head.scores.weight": 0.004,
            "head.scores.bias": 0.004,
            "mixing": 0.005,
            "gate.weight": 0.005,
        }

    def test_without_them_they_have_the_rate_of_vectors(self) -> None:
        found = peaks(Gated(), optimizer="muon", adamw_learning_rate=0.002)
        assert {name for name, rate in found.items() if rate == 0.01} == {"mix.weight", "keep.weight"}
        assert {rate for name, rate in found.items() if name not in ("mix.weight", "keep.weight")} == {0.002}

    def test_groups_are_the_same_as_ever_without_them(self) -> None:
        """One group for what decays and one for the rest, in the order of the parameters."""
        model = Gated()
        _, adamw = build_optimizers(model, stage(optimizer="muon"))
        (group,) = adamw.param_groups
        assert [*group["params"]] == [
            p for name, p in model.named_parameters() if name not in ("mix.weight", "keep.weight")
        ]

    def test_tables_of_ngrams_are_embeddings(self) -> None:
        found = peaks(modern(ngrams=(2, 3), ngram_rows=7, ngram_width=4), optimizer="normuon", **RATES)
        assert {name for name, rate in found.items() if rate == 0.03} == {
            "embedding.weight",
            "ngrams.tables.0.weight",
            "ngrams.tables.1.weight",
        }
        assert found["ngrams.widen.weight"] == 0.01
        assert found["head.scores.weight"] == 0.004

    def test_a_tied_table_is_an_embedding(self) -> None:
        found = peaks(modern(tied=True), **RATES)
        assert found["embedding.weight"] == 0.03
        assert 0.004 not in found.values()

    def test_adaptive_tables(self) -> None:
        vocabulary = VocabularyConfig(cutoffs=(2,), tied=False)
        config = AdaptiveSpanConfig(num_layers=1, width=8, num_heads=2, inner_width=8, vocabulary=vocabulary)
        found = peaks(build(config, 5), **RATES)
        assert {name for name, rate in found.items() if rate == 0.03} == {
            "embedding.tables.0",
            "embedding.tables.1",
        }
        assert {rate for name, rate in found.items() if name.startswith("head.")} == {0.004}

    def test_states_move_to_optimizers_with_other_groups(self) -> None:
        """Rates may be given to a run that began without them."""
        model = Gated()
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        before = build_optimizers(model, stage(optimizer="normuon"))
        for optimizer in before:
            optimizer.step()
        saved = memories(model, before)
        after = build_optimizers(model, stage(optimizer="normuon", **RATES))
        restore_memories(model, after, saved)
        found = memories(model, after)
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], value) for name, value in saved.items())


def test_epsilon_reaches_adam() -> None:
    for kind in ("adam", "adamw", "muon", "normuon"):
        *_, adam = build_optimizers(TinyModel(), stage(optimizer=kind, epsilon=1e-10))
        assert {group["eps"] for group in adam.param_groups} == {1e-10}
        *_, adam = build_optimizers(TinyModel(), stage(optimizer=kind))
        assert {group["eps"] for group in adam.param_groups} == {1e-8}


def test_matrices_that_nobody_declares_are_named_for_normuon_too() -> None:
    notices = [undeclared_notice(TinyModel(), [stage(optimizer=kind)]) for kind in ("muon", "normuon")]
    assert notices[0] == notices[1]
    assert "span_LH" in (notices[0] or "")


def test_normuon_has_cautious_decay_if_asked() -> None:
    for asked in (False, True):
        normuon, _ = build_optimizers(TinyModel(), stage(optimizer="normuon", cautious_decay=asked))
        assert isinstance(normuon, NorMuon)
        assert {group["cautious"] for group in normuon.param_groups} == {asked}


class TestMomentum:
    def test_it_rises_and_falls_on_straight_lines(self) -> None:
        shape = stage(optimizer="normuon", momentum_warmup_steps=10, momentum_cooldown=0.2)
        assert [momentum(shape, t) for t in (1, 5, 10, 50, 81)] == pytest.approx(
            [0.86, 0.9, 0.95, 0.95, 0.95]
        )
        assert [momentum(shape, t) for t in (91, 96, 101)] == pytest.approx([0.9, 0.875, 0.85])

    def test_the_cool_down_follows_the_clock(self) -> None:
        timed = stage(optimizer="muon", momentum_cooldown=0.5, momentum_start=0.5, max_seconds=60.0)
        assert [momentum(timed, 1, t) for t in (0.0, 30.0, 45.0, 60.0)] == pytest.approx(
            [0.95, 0.95, 0.725, 0.5]
        )

    def test_without_options_it_is_constant(self) -> None:
        for kind, expected in (("muon", 0.95), ("normuon", 0.95), ("sgd", 0.0), ("adamw", 0.0)):
            assert {momentum(stage(optimizer=kind), t) for t in (1, 50, 100)} == {expected}
        assert momentum(stage(optimizer="sgd", momentum=0.5), 1) == 0.5

    def test_a_run_uses_it(self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        used = []
        move = NorMuon._move
        monkeypatch.setattr(NorMuon, "_move", lambda *a: (used.append(a[2]["momentum"]), move(*a)))
        options = {"optimizer": "normuon", "steps": 8, "momentum_warmup_steps": 4, "momentum_cooldown": 0.25}
        config = small_config(
            text, stage__1__steps=5, **{f"stage__0__{name}": value for name, value in options.items()}
        )
        run = train(config, tmp_path / "run")
        assert used == pytest.approx([0.875, 0.9, 0.925, 0.95, 0.95, 0.95, 0.95, 0.9])
        assert metrics(run.path)[-1]["step"] == 13


class TestDecay:
    def test_it_follows_the_rate_if_asked(self) -> None:
        for schedule, expected in (("constant", 0.2), ("learning-rate", 0.05)):
            optimizers = build_optimizers(
                TinyModel(), stage(optimizer="normuon", weight_decay=0.2, weight_decay_schedule=schedule)
            )
            set_rate(optimizers, 0.25)
            set_rate(optimizers, 0.25)  # of the peak, not of the rate before
            (group,) = optimizers[0].param_groups
            assert group["weight_decay"] == pytest.approx(expected)
            assert {g["weight_decay"] for g in optimizers[1].param_groups} == {0.0}

    def test_a_step_decays_by_the_square_of_the_fraction(self) -> None:
        model = TinyModel()
        optimizers = build_optimizers(
            model, stage(optimizer="muon", weight_decay=0.4, weight_decay_schedule="learning-rate")
        )
        before = model.keep.weight.detach().clone()
        model.keep.weight.grad = torch.zeros_like(before)
        set_rate(optimizers, 0.5)
        optimizers[0].step()
        torch.testing.assert_close(model.keep.weight.detach(), before * (1 - 0.01 * 0.4 * 0.5**2))
