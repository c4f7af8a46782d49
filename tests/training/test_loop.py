"""The loop around the steps: metrics, stages, limits, and models that go wrong."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import longspan
from longspan.config import RunConfig, StageConfig, schema
from longspan.data import corpora, prepare
from longspan.errors import UserError
from longspan.flops import Shape
from longspan.models import build
from longspan.runs import RunFolder, checkpoint
from longspan.training import Diverged, Interrupted, PlainReporter, Reporter, resume, scoring, train
from longspan.training.loop import Loop
from longspan.training.loss_meter import LossMeter
from longspan.training.run_progress import RunProgress
from longspan.training.step import Updater

from .runs import Lines, Signals, metrics, outcome, small_config, small_table
from .tiny import TinyModel


def run_tiny(
    config: RunConfig, out: Path, model: TinyModel | None = None, reporter: Reporter | None = None
) -> tuple[RunFolder, TinyModel]:
    """The loop with a model it cannot know."""
    corpus = prepare(config.data)
    folder = RunFolder.create(out, config, corpus.tokenizer, corpus.fingerprint)
    model = model or TinyModel(256)
    Loop(folder, corpus, model, reporter or Reporter()).run()
    return folder, model


def test_the_loop_needs_only_the_interface(text: Path, tmp_path: Path) -> None:
    folder, model = run_tiny(small_config(text), tmp_path / "run")
    assert model.updates == 43
    final = folder.final()
    assert final is not None
    first = metrics(folder.path)[0]
    assert final["test"]["bits_per_byte"] < first["bits_per_byte"] - 0.5


def test_metrics_say_what_happened(uninterrupted: Path) -> None:
    lines = metrics(uninterrupted)
    train_lines = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in train_lines] == [7, 14, 21, 28, 35, 42, 43]
    assert [line["stage"] for line in train_lines] == ["train"] * 3 + ["fine"] * 4
    for line in train_lines:
        assert line["bits_per_byte"] == line["loss"] / math.log(2)
        assert line["tokens_per_second"] > 0
        assert 4 <= line["span_mean"] <= line["span_max"] <= 16
    assert train_lines[0]["learning_rate"] == pytest.approx(0.01 * (1 + math.cos(math.pi * 6 / 25)) / 2)
    assert train_lines[3]["learning_rate"] == pytest.approx(0.01 * 3 / 4)
    assert train_lines[-1]["learning_rate"] == 0.01
    assert train_lines[-1]["loss"] < train_lines[0]["loss"]

    valid = [line for line in lines if line["kind"] == "valid"]
    assert [line["step"] for line in valid] == [15, 30, 43]
    assert {line["tokens"] for line in valid} == {300}
    assert {line["bytes"] for line in valid} == {300}
    best = min(valid, key=lambda line: line["loss"])

    final = lines[-1]
    assert final["kind"] == "final"
    assert final["step"] == best["step"]
    assert final["test"]["tokens"] + final["test"]["skipped"] == final["test"]["bytes"] + 1
    assert final["test"]["bits_per_byte"] == pytest.approx(
        final["test"]["nats"] / math.log(2) / final["test"]["bytes"]
    )


def test_tensorboard_has_the_same_numbers(uninterrupted: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(uninterrupted / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    lines = [line for line in metrics(uninterrupted) if line["kind"] == "train"]
    assert shown == [(line["step"], pytest.approx(line["loss"])) for line in lines]
    final = metrics(uninterrupted)[-1]
    assert not [tag for tag in events.Tags()["scalars"] if tag.endswith(("/nats", "/seconds"))]
    for split in ("valid", "test"):
        (event,) = events.Scalars(f"final/{split}/bits_per_byte")
        assert (event.step, event.value) == (final["step"], pytest.approx(final[split]["bits_per_byte"]))


def test_one_process_has_nothing_to_shard(text: Path, tmp_path: Path) -> None:
    plain, sharded = small_config(text), small_config(text, training__shard=True)
    assert outcome(train(sharded, tmp_path / "sharded").path) == outcome(
        train(plain, tmp_path / "plain").path
    )


def test_the_final_score_is_that_of_the_best_weights(text: Path, tmp_path: Path) -> None:
    class Forgets(TinyModel):
        """Good until step 30, then useless."""

        def after_update(self) -> None:
            super().after_update()
            if self.updates > 30:
                nn.init.normal_(self.head.scores.bias, std=9.0)

    folder, _ = run_tiny(small_config(text, evaluation__max_tokens=10**6), tmp_path / "run", Forgets(256))
    final = folder.final()
    assert final is not None
    assert final["step"] == 30
    seen = {line["step"]: line["loss"] for line in metrics(folder.path) if line["kind"] == "valid"}
    assert final["valid"]["loss"] == seen[30] < seen[43]


class TestDivergence:
    def test_the_first_bad_step_is_named_and_the_good_checkpoint_stays(
        self, text: Path, tmp_path: Path
    ) -> None:
        class Breaks(TinyModel):
            def after_update(self) -> None:
                super().after_update()
                if self.updates == 23:
                    nn.init.constant_(self.mix.weight, math.nan)

        with pytest.raises(Diverged, match=r"the loss is nan at step 24 with learning rate 0\.00") as stop:
            run_tiny(small_config(text, training__log_every=100), tmp_path / "run", Breaks(256))
        last = tmp_path / "run" / "checkpoints" / "last.safetensors"
        assert f"the last good checkpoint is {last} of step 20" in str(stop.value)
        assert "\n" not in str(stop.value)
        saved = checkpoint.load(last)
        assert saved.facts["progress"]["step"] == 20
        assert all(bool(t.isfinite().all()) for t in saved.below("model").values())

    def test_weights_that_broke_in_the_latest_update_are_not_saved(self, text: Path, tmp_path: Path) -> None:
        class Breaks(TinyModel):
            def after_update(self) -> None:
                super().after_update()
                if self.updates == 20:  # a checkpoint is due now, and every loss so far was finite
                    nn.init.constant_(self.mix.bias, math.inf)

        with pytest.raises(Diverged, match="weights are no longer finite at step 20"):
            run_tiny(small_config(text), tmp_path / "run", Breaks(256))
        saved = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.safetensors")
        assert saved.facts["progress"]["step"] == 10

    def test_the_newest_of_best_and_last_is_named(self, text: Path, tmp_path: Path) -> None:
        class Breaks(TinyModel):
            def after_update(self) -> None:
                super().after_update()
                if self.updates == 18:
                    nn.init.constant_(self.mix.weight, math.nan)

        with pytest.raises(Diverged) as stop:  # the latest checkpoint is of step 10, the best of step 15
            run_tiny(small_config(text), tmp_path / "run", Breaks(256))
        best = tmp_path / "run" / "checkpoints" / "best.safetensors"
        assert f"the last good checkpoint is {best} of step 15" in str(stop.value)
        assert checkpoint.load(best).facts["progress"]["step"] == 15

    def test_before_any_checkpoint(self, text: Path, tmp_path: Path) -> None:
        config = small_config(text, stage__0__optimizer="sgd", stage__0__learning_rate=1e9)
        with pytest.raises(Diverged, match="there is no checkpoint yet"):
            train(config, tmp_path / "run")
        assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


class TestStages:
    """Two stages with the same optimizer at the same rate are one."""

    @pytest.mark.parametrize("optimizer", ["adagrad", "adamw", "muon", "sgd"])
    def test_the_optimizer_goes_on_with_its_memory(self, text: Path, tmp_path: Path, optimizer: str) -> None:
        table = small_table(text)
        stage: dict[str, Any] = {"optimizer": optimizer, "learning_rate": 0.01, "clip_norm": 0.1}
        if optimizer in ("muon", "sgd"):
            stage["momentum"] = 0.9
        weights = []
        for cuts in ([13], [5, 8]):
            table["stage"] = [{**stage, "steps": steps} for steps in cuts]
            folder, model = run_tiny(schema.read(RunConfig, table), tmp_path / str(len(cuts)))
            assert checkpoint.load(folder.checkpoint("last")).facts["progress"]["stage_step"] == cuts[-1]
            weights.append([p.detach().clone() for p in model.parameters()])
            torch.manual_seed(0)
        assert all(torch.equal(one, two) for one, two in zip(*weights, strict=True))

    def test_another_optimizer_begins_with_nothing(self, text: Path, tmp_path: Path) -> None:
        folder, _ = run_tiny(small_config(text), tmp_path / "run")
        kept = checkpoint.load(folder.checkpoint("last")).below("optimizer")
        assert {name.rpartition(".")[2] for name in kept} == {"sum"}


class TestTime:
    def test_it_is_that_of_the_device_and_of_training_alone(
        self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A device on which starting a step takes 1 s, what is left of the work 4 s more when one waits."""
        now = 0.0
        reads = 0

        def taking(seconds: float, function: Callable[..., Any]) -> Callable[..., Any]:
            def slow(*args: Any, **kwargs: Any) -> Any:
                nonlocal now
                now += seconds
                return function(*args, **kwargs)

            return slow

        def read(window: LossMeter) -> Any:
            nonlocal now, reads
            if window._waiting:
                now, reads = now + 4.0, reads + 1
            return really_read(window)

        really_read = LossMeter.read
        monkeypatch.setattr("longspan.training.clock.time.perf_counter", lambda: now)
        monkeypatch.setattr(Updater, "update", taking(1.0, Updater.update))
        monkeypatch.setattr(LossMeter, "read", read)
        monkeypatch.setattr(scoring, "evaluate", taking(100.0, scoring.evaluate))
        monkeypatch.setattr(checkpoint, "save", taking(1000.0, checkpoint.save))
        folder, _ = run_tiny(small_config(text), tmp_path / "run")
        facts = checkpoint.load(folder.checkpoint("last")).facts["progress"]
        assert facts["seconds"] == 43 * 1.0 + reads * 4.0
        first, second = [line for line in metrics(folder.path) if line["kind"] == "train"][:2]
        assert first["seconds"] == 7 * 1.0 + 4.0
        assert first["tokens_per_second"] == first["tokens"] / first["seconds"]
        # A checkpoint at step 10 made it wait twice.
        assert second["tokens_per_second"] == (second["tokens"] - first["tokens"]) / (7 * 1.0 + 2 * 4.0)

    def test_what_is_left_covers_all_stages(self) -> None:
        stages = [
            StageConfig(steps=10, learning_rate=1.0),
            StageConfig(steps=20, learning_rate=1.0),
            StageConfig(steps=10**6, learning_rate=1.0, max_seconds=7.0),
        ]
        progress = RunProgress(step=4, stage_step=4, seconds=2.0, stage_seconds=2.0)
        assert progress.seconds_left(stages) == 0.5 * 6 + 0.5 * 20 + 7.0
        late = RunProgress(step=130, stage=2, stage_step=100, seconds=65.0, stage_seconds=6.5)
        assert late.seconds_left(stages) == 0.5


def test_a_limit_of_time_ends_the_stage(text: Path, tmp_path: Path) -> None:
    config = small_config(text, stage__0__steps=10**6, stage__0__max_seconds=0.2)
    folder, model = run_tiny(config, tmp_path / "run")
    facts = checkpoint.load(folder.checkpoint("last")).facts["progress"]
    assert facts["stage"] == 1
    assert facts["stage_step"] == 18
    assert 18 < model.updates < 10**5
    assert facts["seconds"] - facts["stage_seconds"] >= 0.2


def test_an_epoch_ends_the_training(text: Path, tmp_path: Path) -> None:
    config = small_config(text, training__at_end="stop", training__block_jitter=False, stage__0__steps=10**6)
    said = Lines()
    folder, model = run_tiny(config, tmp_path / "run", reporter=said)
    lane = len(prepare(config.data).splits["train"]) // 6
    assert model.updates == math.ceil((lane - 1) / 24)
    facts = checkpoint.load(folder.checkpoint("last")).facts["progress"]
    assert facts["tokens"] == 6 * (lane - 1)
    ended = f"the text ended after step {model.updates:,}, 0.0% of the training: learning rates"
    assert sum(line.startswith(ended) for line in said.lines) == 1


def test_the_same_settings_give_the_same_run_and_leave_no_trace(
    text: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    torch.manual_seed(77)
    before = torch.get_rng_state()
    folder = train(small_config(text, stage__0__steps=7), tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)
    assert metrics(folder.path)[0]["loss"] != metrics(uninterrupted)[0]["loss"]  # another cosine
    again = train(small_config(text, stage__0__steps=7), tmp_path / "again")
    assert metrics(again.path)[0]["loss"] == metrics(folder.path)[0]["loss"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_runs_in_lower_precision(text: Path, tmp_path: Path, precision: str) -> None:
    config = small_config(text, training__precision=precision, stage__1__steps=1)
    folder = train(config, tmp_path / "run")
    losses = [line["loss"] for line in metrics(folder.path) if line["kind"] == "valid"]
    assert losses[-1] < 4.0
    scaler = checkpoint.load(folder.checkpoint("last")).facts["scaler"]
    assert ("scale" in scaler) == (precision == "fp16")


def test_a_compiled_model_computes_the_same(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, compiled = torch.compile, []

    def without_code_generation(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled.append(function)
        return plain(function, backend="eager")  # all of compilation but the slow part

    monkeypatch.setattr(torch, "compile", without_code_generation)
    changes: dict[str, Any] = {"model__dropout": 0.0, "stage__0__steps": 4, "stage__1__steps": 1}
    changes |= {"training__log_every": 1, "training__block_jitter": False}
    eager = train(small_config(text, **changes), tmp_path / "eager")
    fast = train(small_config(text, training__compile=True, **changes), tmp_path / "fast")
    assert compiled
    losses = [[line["loss"] for line in metrics(run.path)[:-1]] for run in (fast, eager)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_scores_compile_nothing(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, score, compiled = torch.compile, scoring.evaluate, []
    in_scores = []

    def counted(graph: Any, _: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    def counting(*args: Any, **options: Any) -> Any:
        before = len(compiled)
        found = score(*args, **options)
        in_scores.append(len(compiled) - before)
        return found

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", lambda function: plain(function, backend=counted))
    monkeypatch.setattr(scoring, "evaluate", counting)
    changes: dict[str, Any] = {"stage__0__steps": 4, "stage__1__steps": 1, "training__block_jitter": False}
    run = train(small_config(text, training__compile=True, **changes), tmp_path / "run")
    assert compiled
    assert in_scores == [0, 0, 0]
    assert metrics(run.path)[-1]["valid"]["loss"] == longspan.evaluate(run.path, split="valid").loss


def test_bits_per_byte_whatever_the_tokens_are(text: Path, tmp_path: Path) -> None:
    """Nats per token become bits per byte by the tokens and bytes of the whole split."""
    changes = {"stage__0__steps": 7, "stage__1__steps": 1}
    for kind in ("word", "adaptive-span"):
        config = small_config(text, data__tokenizer__kind=kind, **changes)
        train_split = prepare(config.data).splits["train"]
        assert len(train_split) != train_split.num_bytes
        first = metrics(train(config, tmp_path / kind).path)[0]
        ratio = len(train_split) / train_split.num_bytes
        assert first["bits_per_byte"] == pytest.approx(first["loss"] / math.log(2) * ratio)


def test_a_corpus_is_found_again_from_elsewhere(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "text.txt").write_bytes(text.read_bytes())
    monkeypatch.chdir(tmp_path / "here")
    quick = {"stage__0__steps": 2, "stage__1__steps": 1}
    with pytest.raises(Interrupted):
        train(
            small_config(Path("text.txt"), **quick),
            tmp_path / "run",
            reporter=Signals("step 2 ", signal.SIGINT),
        )
    monkeypatch.chdir(tmp_path)
    assert resume(tmp_path / "run").config.data.corpus == str(tmp_path / "here" / "text.txt")

    # A name stays a name.
    corpora.add("mine", tmp_path / "here" / "text.txt")
    config = small_config(Path("mine"), **quick)
    assert train(config, tmp_path / "named").config.data.corpus == "mine"


class TestBadInput:
    def test_a_run_folder_that_exists(self, text: Path, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("precious")
        with pytest.raises(UserError, match="exists already"):
            train(small_config(text), tmp_path)
        assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]

    def test_a_text_smaller_than_a_block_leaves_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "short.txt").write_text("too short\n" * 10)
        with pytest.raises(UserError, match="tokens"):
            train(small_config(tmp_path / "short.txt"), tmp_path / "run")
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("inner_width", "complaint"),  # no memory has addresses for so much
        [(2**43, "the weights of the model need .* GiB"), (2**60, "the model does not fit into memory")],
    )
    def test_nor_does_a_model_that_no_memory_holds(
        self, text: Path, tmp_path: Path, inner_width: int, complaint: str
    ) -> None:
        with pytest.raises(UserError, match=complaint):
            train(small_config(text, model__inner_width=inner_width), tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_nor_does_one_smaller_than_a_segment(self, text: Path, tmp_path: Path) -> None:
        config = small_config(text, training__segment_length=240_000, training__block_jitter=False)
        with pytest.raises(UserError, match=r"one segment of .* smaller segment_length"):
            train(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_held_out_text_too_short_for_its_protocol_is_noticed_before_training(
        self, text: Path, tmp_path: Path
    ) -> None:
        config = small_config(text, evaluation__protocol="adaptive-span", evaluation__batch_size=64)
        with pytest.raises(UserError, match="too few to score"):
            train(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_a_device_is_looked_for_before_text_is_prepared(
        self, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = small_config(text, training__device="tpu")
        corpus = prepare(config.data)
        begun = RunFolder.create(tmp_path / "begun", small_config(text), corpus.tokenizer, corpus.fingerprint)
        (begun.path / "config.toml").write_text(config.to_toml())
        monkeypatch.setattr("longspan.training.run.prepare", lambda *a, **k: pytest.fail("prepared first"))
        with pytest.raises(UserError, match="there is no device 'tpu'"):
            train(config, tmp_path / "run")
        with pytest.raises(UserError, match="there is no device 'tpu'"):
            resume(begun.path)

    def test_no_stages(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"no \[\[stage"):
            train(RunConfig(), tmp_path / "run")


def test_plain_lines_for_a_log(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(text, stage__0__steps=7, stage__1__steps=1, training__log_every=7)
    train(config, tmp_path / "run", reporter=PlainReporter())
    stamp = r"(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (?=step )"
    shown = capsys.readouterr().out
    assert len(re.findall(stamp, shown)) == len(re.findall("(?m)step \\d", shown)) == 3
    lines = re.sub(stamp, "", shown).splitlines()
    tokens = len(prepare(config.data).splits["train"])
    model = build(config.model, 256)
    size = sum(parameter.numel() for parameter in model.parameters())
    flops = model.flops(Shape(config.training.batch_size, config.training.block_length))
    first_step = lines.index(next(line for line in lines if line.startswith("step")))
    assert lines[first_step - 1].startswith("memory for a step: about ")
    assert lines[first_step - 2] == (
        f"small: {size:,} parameters, {flops / 1e6:.1f} MFLOPs per token forward; on cpu in float32, "
        "not compiled, "
        f"{tokens:,} tokens to train on (byte, vocabulary 256), "
        f"run folder {tmp_path / 'run'}"
    )
    assert any(re.match(r"step 7 of 8  loss .* bits/byte .* \d:\d\d left", line) for line in lines)
    assert any(line.startswith("step 8 of 8  held-out loss ") and "(best so far)" in line for line in lines)
    assert not any("\x1b" in line or "\r" in line for line in lines)
