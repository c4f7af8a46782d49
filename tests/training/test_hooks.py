"""What a user's module tells the trainer, and what the trainer makes of it; nothing here knows the module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from longspan import hooks
from longspan.config import RunConfig, StageConfig
from longspan.data import Lanes, prepare
from longspan.errors import UserError
from longspan.flops import Shape, flops
from longspan.generation import Decoder
from longspan.layers.learned_span import LearnedSpan
from longspan.optim import Muon, build_optimizers, undeclared_notice
from longspan.runs import RunFolder, checkpoint
from longspan.training.averaging import Average
from longspan.training.formatting import readable
from longspan.training.loop import Loop
from longspan.training.run_progress import RunProgress
from longspan.training.step import Updater

from .own_model import Gate, OwnModel
from .runs import Lines, metrics, outcome, small_config

RUN = {"stage__0__steps": 20, "stage__1__steps": 10, "training__block_length": 300}


def loop_for(
    config: RunConfig, out: Path, model: OwnModel, reporter: Lines | None = None, going_on: bool = False
) -> Loop:
    torch.manual_seed(config.training.seed)
    corpus = prepare(config.data)
    if going_on:
        folder = RunFolder.open(out)
        saved = checkpoint.load(folder.checkpoint("last"))
        return Loop(folder, corpus, model, reporter or Lines(), saved)
    folder = RunFolder.create(out, config, corpus.tokenizer, corpus.fingerprint)
    return Loop(folder, corpus, model, reporter or Lines())


def fresh(num_gates: int = 1) -> OwnModel:
    torch.manual_seed(5)
    return OwnModel(256, num_gates=num_gates)


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, OwnModel]:
    """A run of a user's model that nothing happened to."""
    out, model = tmp_path_factory.mktemp("own") / "run", fresh()
    loop_for(small_config(text, **RUN), out, model).run()
    return out, model


def test_penalties_change_the_gradient_by_their_own() -> None:
    model = OwnModel(num_gates=2).double()
    tokens_BT = torch.randint(11, (2, 7))

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        Updater(model).gradients(tokens_BT, tokens_BT, model.initial_state(2))
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    assert model.penalties().keys() == {"scale"}
    torch.testing.assert_close(model.penalties()["scale"], torch.tensor(2 * 0.25 * 6 * 0.25).double())
    with_penalty = gradients()
    for gate in model.gates:
        gate.penalties = dict  # says nothing
    without = gradients()
    for name, p in model.named_parameters():
        extra = 0.5 * p.detach() if name.endswith("scale_D") else torch.zeros_like(p)
        torch.testing.assert_close(with_penalty[name] - without[name], extra, atol=1e-12, rtol=0)


def test_a_run_calls_every_hook_as_often_as_it_should(whole: tuple[Path, OwnModel], text: Path) -> None:
    out, model = whole
    config = RunFolder.open(out).config
    tokens = prepare(config.data).splits["train"].tokens
    lanes, expected = Lanes(tokens, 6, 300, jitter=True, seed=config.training.seed), []
    position = lanes.start
    for _ in range(30):
        block = lanes.next(position)
        assert block is not None
        position = block.position
        expected.append(position.epoch)
    assert expected[-1] >= 2
    (gate,) = model.gates
    numbers = [heard for heard in gate.heard if isinstance(heard, int)]
    assert numbers == expected
    last = checkpoint.load(RunFolder.open(out).checkpoint("last")).below("model")
    assert last["gates.0.updates"] == gate.heard.count("after_update") == 30
    # After every update, and after the best weights were loaded for the last score.
    assert gate.heard.count("refresh") == 31
    assert gate.heard[:3] == [0, "after_update", "refresh"]
    assert gate.heard[-1] == "refresh"


def test_a_run_tells_how_much_of_it_is_done(whole: tuple[Path, OwnModel]) -> None:
    """When it begins and before every step; 1 before the evaluation at the end, and with the best weights."""
    (gate,) = whole[1].gates
    assert gate.told == pytest.approx([0, *(step / 30 for step in range(30)), 1.0, 1.0])
    assert gate.told[-1] == gate.told[-2] == 1.0


def test_stages_count_by_their_steps_or_by_their_time() -> None:
    def stages(*options: dict[str, Any]) -> list[StageConfig]:
        return [StageConfig(learning_rate=0.1, **each) for each in options]

    by_steps = stages({"steps": 30}, {"steps": 10, "max_seconds": 4.0})
    assert RunProgress(stage_step=15, stage_seconds=99.0).done(by_steps) == 15 / 40
    assert RunProgress(stage=1, stage_step=1, stage_seconds=2.0).done(by_steps) == 35 / 40
    by_time = stages({"steps": 10**9, "max_seconds": 6.0}, {"steps": 8, "max_seconds": 2.0})
    assert RunProgress(stage_step=15, stage_seconds=3.0).done(by_time) == 3 / 8
    assert RunProgress(stage=1, stage_step=4, stage_seconds=0.5).done(by_time) == 7 / 8
    assert RunProgress(stage=1, stage_step=8, stage_seconds=0.5).done(by_time) == 1.0


def test_loading_and_averaging_refresh_what_is_derived() -> None:
    model, other = OwnModel(), OwnModel()
    with torch.no_grad():
        other.gates[0].scale_D.fill_(2.0)
    model.load_state_dict(other.state_dict())
    assert model.gates[0].strength == 12.0
    assert model.gates[0].updates == 0
    average = Average(model, 0.5)
    average.weights["gates.0.scale_D"].fill_(3.0)
    with average.in_place():
        assert model.gates[0].strength == 18.0
    assert model.gates[0].strength == 12.0


def test_diagnostics_are_metrics_and_curves(whole: tuple[Path, OwnModel]) -> None:
    out, _ = whole
    lines = [line for line in metrics(out) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [7, 14, 21, 28, 30]
    assert all("gate_all" not in line for line in lines)
    scales = [json.loads(line)["scales"] for line in (out / "gate-scales.jsonl").read_text().splitlines()]
    assert [line["gate/strength"] for line in lines] == pytest.approx(list(map(sum, scales)), rel=1e-6)
    board = EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    curve = board.Scalars("train/gate/strength")
    assert [(event.step, event.value) for event in curve] == [
        (line["step"], pytest.approx(line["gate/strength"])) for line in lines
    ]


def test_records_have_a_file_of_their_own(whole: tuple[Path, OwnModel]) -> None:
    out, _ = whole
    lines = [json.loads(line) for line in (out / "gate-scales.jsonl").read_text().splitlines()]
    assert [list(line) for line in lines] == [["step", "updates", "scales"]] * 5
    assert [(line["step"], line["updates"]) for line in lines] == [(n, n) for n in (7, 14, 21, 28, 30)]
    assert not (out / "spans.jsonl").exists()


class Killed(BaseException):
    """The process ends here: nothing is saved any more."""


@pytest.mark.parametrize("step", [9, 16, 29])
def test_records_are_cut_back_on_resume(
    text: Path, whole: tuple[Path, OwnModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Checkpoints are made every 10 steps and records every 7: some are later than the last checkpoint."""
    out, config = tmp_path / "run", small_config(text, **RUN)
    update, calls = Updater.update, 0

    def dying(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == step:
            raise Killed
        return update(*arguments, **options)

    monkeypatch.setattr(Updater, "update", dying)
    with pytest.raises(Killed):
        loop_for(config, out, fresh()).run()
    monkeypatch.undo()
    written = (out / "gate-scales.jsonl").read_bytes()
    (out / "gate-scales.jsonl").write_bytes(written + b'{"step": 28, "upd')
    saved = RunFolder.open(out).checkpoint("last").exists()
    assert saved == (step > 10)
    if saved:
        loop_for(config, out, fresh(), going_on=True).run()
    else:
        corpus, model = prepare(config.data), fresh()
        torch.manual_seed(config.training.seed)
        Loop(RunFolder.open(out), corpus, model, Lines()).run()
    assert outcome(out) == outcome(whole[0])


def test_modules_that_give_one_name_are_told_apart_or_averaged() -> None:
    model = OwnModel(num_gates=2)
    with torch.no_grad():
        model.gates[1].scale_D.fill_(1.5)
    assert model.records()["gate-scales"] == {
        "gates.0": {"updates": 0, "scales": [0.5] * 6},
        "gates.1": {"updates": 0, "scales": [1.5] * 6},
    }
    seen = model.diagnostics()
    assert seen["gate/strength"] == pytest.approx((3 + 9) / 2)
    assert seen.keys() == {"gate/strength", "gates.0.gate_all", "gates.1.gate_all"}
    assert seen["gates.1.gate_all"].tolist() == [1.5] * 6


def test_a_class_answers_for_all_its_modules_at_once() -> None:
    asked = []

    class Together(Gate):
        @staticmethod
        def penalties_of(modules: list[Gate]) -> dict[str, Tensor]:
            asked.append(modules)
            return {"scale": torch.stack([module.scale_D for module in modules]).sum()}

        @staticmethod
        def begin_epoch_of(modules: list[Gate], number: int) -> None:
            asked.append((modules, number))

    model = OwnModel(num_gates=1)
    model.gates.append(Together(6))
    model.gates.append(nn.Sequential(Together(6)))
    both = [model.gates[1], model.gates[2][0]]
    torch.testing.assert_close(model.penalties()["scale"], torch.tensor(0.25 * 6 * 0.25 + 2 * 3.0))
    model.begin_epoch(4)
    assert asked == [both, (both, 4)]
    assert model.gates[0].heard == [4]


def test_a_model_inside_a_model_answers_for_its_modules() -> None:
    class Around(OwnModel):
        def __init__(self) -> None:
            super().__init__()
            self.inner = OwnModel()

    model = Around()
    torch.testing.assert_close(model.penalties()["scale"], torch.tensor(2 * 0.25 * 6 * 0.25))
    model.after_update()
    assert [gate.updates.item() for gate in (model.gates[0], model.inner.gates[0])] == [1, 1]
    declared = model.optimizer_groups()["matrix"]
    assert len(declared) == len(set(declared)) == 4


def test_flops_are_the_modules_own_and_those_of_known_layers() -> None:
    model, D, V = OwnModel(num_gates=2), 6, 11
    gates = 2 * (2 * 3 * D * D + 100 / 5)
    assert model.flops(Shape(2, 5)) == pytest.approx(2 * 6 * D * D + gates + 2 * D * V)
    assert flops(nn.Conv1d(4, 6, 3, groups=2), Shape(2, 5)) == 2 * 6 * 2 * 3
    assert flops(nn.LSTMCell(4, 6), Shape(2, 5)) == 2 * (24 * 4 + 24 * 6)
    assert flops(nn.LSTM(4, 6, bidirectional=True), Shape(2, 5)) == 2 * 2 * (24 * 4 + 24 * 6)
    assert flops(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), Shape(2, 5)) == 2 * (24 + 12)
    assert flops(nn.LayerNorm(4), Shape(2, 5)) == 0


class TestOptimizerGroups:
    MATRICES = frozenset({"gates.0.weight_DD", "gates.0.many_NDD", "gru.weight_ih_l0", "gru.weight_hh_l0"})

    def stage(self, **settings: Any) -> StageConfig:
        return StageConfig(**{"steps": 10, "learning_rate": 0.5, **settings})

    @pytest.mark.parametrize("kind", ["adagrad", "adam", "adamw", "lamb", "sgd", "muon"])
    def test_every_parameter_ends_where_it_was_declared(self, kind: Any) -> None:
        model = OwnModel()
        decay = {} if kind == "adagrad" else {"weight_decay": 0.1}
        optimizers = build_optimizers(model, self.stage(optimizer=kind, span_learning_rate=0.01, **decay))
        names = {id(p): name for name, p in model.named_parameters()}
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        held = [names[id(p)] for group in groups for p in group["params"]]
        assert sorted(held) == sorted(names.values())

        def in_groups(key: str, value: float) -> set[str]:
            chosen = [group for group in groups if group.get(key) == value]
            return {names[id(p)] for group in chosen for p in group["params"]}

        assert in_groups("peak", 0.01) == {"gates.0.scale_D"}
        decaying = set() if kind == "adagrad" else self.MATRICES | {"gates.0.lookup_3D"}
        assert in_groups("weight_decay", 0.1) == decaying
        if kind == "muon":
            muon, _ = optimizers
            assert isinstance(muon, Muon)
            assert {names[id(p)] for g in muon.param_groups for p in g["params"]} == self.MATRICES

    def test_the_model_itself_may_declare_too_and_decides(self) -> None:
        class Declaring(OwnModel):
            def __init__(self) -> None:
                super().__init__()
                self.extra_DD = nn.Parameter(torch.ones(6, 6))

            def optimizer_groups(self) -> dict[str, list[nn.Parameter]]:
                return {
                    "matrix": [self.extra_DD],
                    "no_decay": [self.gates[0].weight_DD, self.gru.weight_ih_l0],
                }

        model = Declaring()
        muon, _ = build_optimizers(model, self.stage(optimizer="muon"))
        names = {id(p): name for name, p in model.named_parameters()}
        held = {names[id(p)] for group in muon.param_groups for p in group["params"]}
        assert held == {"extra_DD", "gates.0.many_NDD", "gru.weight_hh_l0"}

    def test_muon_moves_what_is_declared_and_many_matrices_as_if_each_was_alone(self) -> None:
        model = OwnModel()
        gate = model.gates[0]
        muon, _ = build_optimizers(model, self.stage(optimizer="muon", weight_decay=0.1))
        apart = [nn.Parameter(matrix.detach().clone()) for matrix in gate.many_NDD]
        alone = Muon(apart, lr=0.5, momentum=0.95, weight_decay=0.1)
        before = gate.weight_DD.detach().clone()
        for step in range(3):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            assert gate.many_NDD.grad is not None
            for matrix, gradient in zip(apart, gate.many_NDD.grad, strict=True):
                matrix.grad = gradient.clone()
            muon.step()
            alone.step()
        torch.testing.assert_close(gate.many_NDD.detach(), torch.stack(apart).detach())
        move = (gate.weight_DD.detach() - before).norm()
        assert move > 0.1

    @pytest.mark.parametrize(
        ("declared", "complaint"),
        [
            (
                lambda gate: {"matrices": []},
                "returns 'matrices': the groups are matrix, decay, no_decay, embedding, head, scalar, span",
            ),
            (lambda gate: {"matrix": [gate.scale_D]}, "gates.0.scale_D as a matrix: it needs 2 dimensions"),
            (
                lambda gate: {"decay": [gate.scale_D], "span": [gate.scale_D]},
                "returns gates.0.scale_D twice, in 'decay' and 'span'",
            ),
            (lambda gate: {"decay": [nn.Parameter(torch.ones(2))]}, "that is not a parameter of the model"),
            (lambda gate: None, r"optimizer_groups\(\) of Gate must return a dict, not None"),
        ],
    )
    def test_a_wrong_declaration_is_one_clear_line(self, declared: Any, complaint: str) -> None:
        model = OwnModel()
        model.gates[0].optimizer_groups = lambda: declared(model.gates[0])
        with pytest.raises(UserError, match=complaint):
            build_optimizers(model, self.stage())

    def test_matrices_that_nobody_declares_are_named(self, text: Path, tmp_path: Path) -> None:
        model = fresh()
        model.gates[0].optimizer_groups = dict
        plain, muon = self.stage(weight_decay=0.0), self.stage(optimizer="muon")
        names = "gates.0.weight_DD, gates.0.many_NDD, gates.0.lookup_3D"
        assert undeclared_notice(model, [plain]) is None
        assert undeclared_notice(model, [plain, muon]) == (
            f"these matrices are trained by AdamW without weight decay: {names}; declare them with "
            "optimizer_groups"
        )
        notice = (
            f"these matrices are trained without weight decay: {names}; declare them with optimizer_groups"
        )
        assert undeclared_notice(model, [self.stage(weight_decay=0.1)]) == notice
        everything = {"weight_decay": 0.1, "weight_decay_of": "all"}
        assert undeclared_notice(model, [self.stage(**everything)]) is None
        by_adamw = f"these matrices are trained by AdamW: {names}; declare them with optimizer_groups"
        assert undeclared_notice(model, [self.stage(optimizer="muon", **everything)]) == by_adamw
        assert undeclared_notice(OwnModel(), [muon]) is None
        said = Lines()
        config = small_config(text, stage__0__weight_decay=0.1, stage__0__steps=1, stage__1__steps=1)
        loop_for(config, tmp_path / "run", model, said).run()
        assert said.lines[0] == notice
        many = OwnModel(num_gates=3)
        for gate in many.gates:
            gate.optimizer_groups = dict
        assert "gates.1.weight_DD and 5 more; declare" in (undeclared_notice(many, [muon]) or "")


class TestFaults:
    @pytest.mark.parametrize(
        ("hook", "answer", "complaint"),
        [
            ("records", {"../gates": {}}, r"the name '../gates': use only letters, digits, '_' and '-'"),
            ("records", {"metrics": {}}, "returns the name 'metrics', a file of the run itself"),
            ("records", {"config": {}}, "returns the name 'config', a file of the run itself"),
            ("records", {"gates": [1.0]}, "must return a dict for 'gates', without 'step'"),
            ("records", {"gates": {"step": 1}}, "must return a dict for 'gates', without 'step'"),
            ("records", {"gates": {"x": torch.ones(2)}}, "returns a value for gates.jsonl that is not JSON"),
            ("records", {"gates": {"x": {1, 2}}}, "returns a value for gates.jsonl that is not JSON"),
            ("diagnostics", {"loss": torch.ones(())}, r"diagnostics\(\) returns 'loss', a metric of the run"),
            ("penalties", {"scale": torch.ones(2)}, "the penalty 'scale' of Gate must be a scalar tensor"),
            ("penalties", None, r"penalties\(\) of Gate must return a dict, not None"),
        ],
    )
    def test_a_wrong_answer_is_one_clear_line(
        self, text: Path, tmp_path: Path, hook: str, answer: Any, complaint: str
    ) -> None:
        model = fresh()
        setattr(model.gates[0], hook, lambda: answer)
        config = small_config(text, training__log_every=1, stage__0__steps=2)
        with pytest.raises(UserError, match=complaint):
            loop_for(config, tmp_path / "run", model).run()
        assert not (tmp_path / "gates.jsonl").exists()

    def test_a_diagnostic_that_is_not_finite_does_not_end_the_run(self, text: Path, tmp_path: Path) -> None:
        model = fresh()
        model.gates[0].diagnostics = lambda: {"odd": torch.tensor(float("nan"))}
        config = small_config(text, stage__0__steps=7, stage__1__steps=1)
        loop_for(config, tmp_path / "run", model).run()
        assert metrics(tmp_path / "run")[0]["odd"] is None

    def test_a_record_that_is_not_finite_is_null(self, text: Path, tmp_path: Path) -> None:
        model = fresh()
        model.gates[0].records = lambda: {"gates": {"x": [1.0, float("nan")]}}
        config = small_config(text, training__log_every=1, stage__0__steps=2)
        loop_for(config, tmp_path / "run", model).run()
        first = (tmp_path / "run" / "gates.jsonl").read_text().splitlines()[0]
        assert json.loads(first) == {"step": 1, "x": [1.0, None]}

    def test_an_attribute_with_the_name_of_a_hook_is_no_hook(self) -> None:
        model = OwnModel()
        model.gru.records = ["of", "something", "else"]  # type: ignore[assignment]
        assert model.records().keys() == {"gate-scales"}
        assert hooks.has(model.gates[0], "records")
        assert not hooks.has(model.gru, "records")


def test_a_line_shows_diagnostics_of_any_name() -> None:
    line = {"kind": "train", "step": 1200, "loss": 1.5, "learning_rate": 0.001, "tokens_per_second": 5000.0}
    assert readable(line, {"span_mean": 312.4, "span_max": 2048.0}) == (
        "step 1,200  loss 1.5000  lr 0.001  5,000 tokens/s  span 312 (max 2048)"
    )
    found = readable(line | {"pattern": "sfsf"}, {"temperature": 0.25, "gate_max": 0.123456, "odd": None})
    assert found.endswith("tokens/s  sfsf  temperature 0.25  gate_max 0.123  odd nan")
    many = readable(line, {f"d{n}": float(n) for n in range(9)})
    assert many.endswith("d4 4  d5 5  ...")


def test_spans_of_layers_that_differ() -> None:
    """In a user's model layers may have other limits, prices and numbers of heads."""
    model = OwnModel()
    model.near = LearnedSpan(2, 32, ramp=4, start=0.5, penalty=0.01)
    model.far = LearnedSpan(3, 256, ramp=4, start=0.25, penalty=0.1)
    torch.testing.assert_close(model.penalties()["span"], torch.tensor(0.01 * 16 + 0.1 * 64))
    with torch.no_grad():
        model.near.fraction_H.copy_(torch.tensor([2.0, 0.25]))
        model.far.fraction_H.copy_(torch.tensor([0.5, -1.0, 0.0]))
    model.refresh()
    assert model.near.fraction_H.tolist() == [1.0, 0.25]
    assert model.near.windows == (32, 16)
    assert [max(window, 16) for window in model.far.windows] == [144, 16, 16]
    assert model.records()["spans"] == {"limit": 256, "spans": [[32.0, 12.0], [132.0, 4.0, 4.0]]}
    seen = model.diagnostics()
    assert "spans_LH" not in seen
    assert seen["span_mean"] == pytest.approx((32 + 12 + 132 + 4 + 4) / 5)
    assert seen["span_max"] == 132


def test_the_decoder_reads_a_model_without_a_step_of_its_own() -> None:
    model = OwnModel().eval()
    assert model.step_from(model.initial_state(2)) is None
    tokens_BT = torch.randint(11, (2, 9))
    with torch.no_grad():
        expected_BTV, _ = model.log_probs(tokens_BT, model.initial_state(2))
    decoder = Decoder(model, model.initial_state(2))
    for t in range(9):
        torch.testing.assert_close(decoder.read(tokens_BT[:, t : t + 1]), expected_BTV[:, t])


def test_the_decoder_uses_the_step_of_any_model() -> None:
    class Stepping(OwnModel):
        def step_from(self, state: Any) -> Any:
            hidden_BD = state.tensor("hidden")

            def step(tokens_1B: Tensor) -> Tensor:
                nonlocal hidden_BD
                x_BTD, after_1BD = self.gru(self.embedding(tokens_1B.t()), hidden_BD[None])
                hidden_BD = after_1BD[0]
                return self.gates(x_BTD).transpose(0, 1)

            return step

        def forward(self, *_: Any) -> Any:
            pytest.fail("the step was there")

    model, tokens_BT = Stepping().eval(), torch.randint(11, (2, 9))
    with torch.no_grad():
        hidden_BTD, _ = OwnModel.forward(model, tokens_BT, model.initial_state(2))
        expected_BTV = model.head.log_probs(hidden_BTD)
    decoder = Decoder(model, model.initial_state(2))
    for t in range(9):
        torch.testing.assert_close(decoder.read(tokens_BT[:, t : t + 1]), expected_BTV[:, t])
