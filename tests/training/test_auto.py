"""`auto` for precision and compilation: resolved once, when a run begins, and kept from then on."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan import recipes
from longspan.bench import Bench
from longspan.config import RunConfig, TrainingConfig, schema
from longspan.errors import UserError
from longspan.kernels import compiler
from longspan.kernels.span_attention import cpu
from longspan.runs import RunFolder, auto_options
from longspan.runs.auto_options import resolved
from longspan.runs.environment import environment
from longspan.training import Interrupted, resume, train
from longspan.training.step import Updater

from .runs import Lines, Signals, metrics, small_config, small_table
from .tiny import TinyModel

AUTO = {"training__precision": "auto", "training__compile": "auto"}
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def on(device: torch.device, **options: Any) -> tuple[str, bool | str]:
    training = resolved(RunConfig(training=TrainingConfig(**options)), device).training
    return training.precision, training.compile


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine whose GPU and Triton are what the dictionary says."""
    machine = {"capability": (9, 0), "triton": True}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: machine["capability"])
    monkeypatch.setattr(auto_options, "has_triton", lambda: machine["triton"])
    return machine


def test_auto_is_the_default_of_options_and_recipes() -> None:
    assert (TrainingConfig().precision, TrainingConfig().compile) == ("auto", "auto")
    for name in recipes.names():
        assert not {"precision", "compile"} & recipes.load(name).get("training", {}).keys(), name


def test_on_a_cpu_it_is_plain_float32() -> None:
    assert on(CPU) == ("float32", False)


def test_on_a_gpu_it_is_compiled_bf16_where_the_gpu_can(gpu: dict[str, Any]) -> None:
    assert on(GPU) == ("bf16", True)
    assert on(GPU, block_jitter=True) == ("bf16", False)  # the shapes change from step to step
    gpu["triton"] = False
    assert on(GPU) == ("bf16", False)
    gpu.update(capability=(7, 5), triton=True)
    assert on(GPU) == ("float32", False)


@pytest.mark.usefixtures("gpu")
def test_what_is_asked_for_is_done(gpu: dict[str, Any]) -> None:
    assert on(GPU, precision="float32") == ("float32", True)
    assert on(GPU, precision="float32", compile=False) == ("float32", False)
    assert on(CPU, precision="bf16", compile=True) == ("bf16", True)


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("true", True), ("false", False)])
def test_compile_is_a_word_or_a_truth_value(text: str, value: str | bool) -> None:
    table: dict[str, Any] = {}
    schema.override(table, "training.compile", text)
    assert schema.read(RunConfig, table).training.compile == value
    config = schema.read(RunConfig, {"training": {"compile": value}})
    assert config.training.compile == value
    assert type(config.training.compile) is type(value)
    assert RunConfig.from_toml(config.to_toml().encode(), "it") == config


@pytest.mark.parametrize(("value", "shown"), [("yes", "'yes'"), (1, "1"), ([True], "[True]")])
def test_anything_else_is_refused(value: Any, shown: str) -> None:
    with pytest.raises(UserError) as problem:
        schema.read(RunConfig, {"training": {"compile": value}})
    assert str(problem.value) == f"'training.compile' must be auto or true or false, not {shown}"


def test_a_run_folder_says_what_was_used(text: Path, tmp_path: Path) -> None:
    config = small_config(text, **AUTO, stage__0__steps=2, stage__1__steps=1)
    folder = train(config, tmp_path / "run", reporter=(said := Lines()))
    assert any("on cpu in float32 (auto), not compiled (auto), " in line for line in said.lines)
    kept = RunFolder(folder.path).config.training
    assert (kept.precision, kept.compile) == ("float32", False)


def test_a_run_of_a_gpu_goes_on_in_its_precision(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun as auto on a machine with bf16, stopped, resumed on a CPU, where auto would be float32."""
    with monkeypatch.context() as there:
        there.setattr(auto_options, "_is_recent_gpu", lambda _: True)
        there.setattr(auto_options, "has_triton", lambda: False)
        with pytest.raises(Interrupted):
            train(small_config(text, **AUTO), tmp_path / "run", reporter=Signals("step 17 ", signal.SIGINT))
        train(small_config(text, **AUTO), tmp_path / "whole")
    resume(tmp_path / "run", reporter=(said := Lines()))
    assert any("on cpu in bf16, not compiled, " in line for line in said.lines)
    losses = [[line["loss"] for line in metrics(tmp_path / run)[:-1]] for run in ("run", "whole")]
    assert losses[0] == losses[1]
    train(small_config(text), tmp_path / "float32")
    assert [line["loss"] for line in metrics(tmp_path / "float32")[:-1]] != losses[1]


def test_auto_written_into_a_begun_run_is_no_way_to_change_it(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(
            small_config(text, training__precision="bf16"),
            run,
            reporter=Signals("step 12 ", signal.SIGINT),
        )
    (run / "config.toml").write_text(small_config(text, **AUTO).to_toml())
    with pytest.raises(UserError, match=r"training\.precision = 'float32', but the run began with 'bf16'"):
        resume(run)


def test_a_run_of_the_version_before_goes_on(text: Path, tmp_path: Path) -> None:
    """Its configuration and its checkpoints know no auto."""
    table = small_table(text)
    assert (table["training"]["precision"], table["training"]["compile"]) == ("float32", False)
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(small_config(text), run, reporter=Signals("step 12 ", signal.SIGINT))
    resume(run, reporter=(said := Lines()))
    assert any("on cpu in float32, not compiled, " in line for line in said.lines)


def test_a_benchmark_measures_what_training_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_options, "_is_recent_gpu", lambda _: True)
    config = schema.read(RunConfig, recipes.load("quickstart"))
    training = Bench(config, 256, CPU).config.training
    assert (training.precision, training.compile) == ("bf16", auto_options.has_triton())


def test_an_update_knows_its_precision() -> None:
    with pytest.raises(ValueError, match="precision 'auto' must be resolved"):
        Updater(TinyModel(), precision="auto")


def test_a_run_folder_is_made_without_compiling(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model without attention to spans needs no C++ at all."""

    def compile_nothing(*_: Any) -> Any:
        raise AssertionError("something was compiled")

    for place in (cpu, compiler):
        monkeypatch.setattr(place, "compiled", compile_nothing)
    monkeypatch.setattr(compiler, "_run", compile_nothing)
    table = small_table(text)
    table["model"] = {
        "architecture": "sha-rnn",
        "num_layers": 2,
        "width": 16,
        "inner_width": 32,
        "memory_length": 8,
    }
    table["stage"] = [{"steps": 2, "learning_rate": 0.01}]
    folder = train(schema.read(RunConfig, table), tmp_path / "run")
    expected = "compiled" if cpu.can_compile() else "plain torch"
    assert json.loads((folder.path / "environment.json").read_text())["attention"] == expected


def test_the_environment_tells_whether_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert environment(CPU)["attention"] == "plain torch"
    monkeypatch.setenv("CXX", "'unbalanced")
    assert environment(CPU)["attention"] == "plain torch"
