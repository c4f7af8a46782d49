"""Which checkpoints a run keeps, what happens when they are damaged, and early stopping."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from longspan.cli import main
from longspan.errors import UserError
from longspan.runs import RunFolder, checkpoint
from longspan.training import Interrupted, is_finished, loop, resume, train

from .runs import Lines, Signals, metrics, outcome, small_config
from .test_resume import Dies


def step_of(path: Path) -> int:
    step: int = checkpoint.load(path).facts["progress"]["step"]
    return step


def damage(path: Path, how: str = "flipped") -> None:
    content = bytearray(path.read_bytes())
    if how == "truncated":
        del content[-10:]
    else:
        content[-10] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def stopped(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in its second stage: never changed itself, only copied."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Interrupted):
        train(small_config(text), run, reporter=Signals("step 38 ", signal.SIGINT))
    return run


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(stopped, tmp_path / "run")))


@pytest.mark.parametrize(("keep", "steps"), [(1, [40]), (2, [40, 30]), (3, [40, 30, 20])])
def test_the_last_ones_are_kept(text: Path, tmp_path: Path, keep: int, steps: list[int]) -> None:
    with pytest.raises(MemoryError):
        train(
            small_config(text, training__keep_checkpoints=keep), tmp_path / "run", reporter=Dies("step 42 ")
        )
    last = RunFolder(tmp_path / "run").checkpoint("last")
    assert [step_of(path) for path in (last, *checkpoint.previous(last))] == steps
    names = {path.name for path in last.parent.iterdir()}
    numbered = {f"last-{number}.safetensors" for number in range(1, keep)}
    assert names == {"last.safetensors", "best.safetensors"} | numbered


def test_without_hard_links(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError

    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(MemoryError):
        train(small_config(text), tmp_path / "run", reporter=Dies("step 32 "))
    last = RunFolder(tmp_path / "run").checkpoint("last")
    assert [step_of(path) for path in (last, *checkpoint.previous(last))] == [30, 20]


@pytest.mark.parametrize("how", ["truncated", "flipped"])
def test_a_damaged_last_one_falls_back_to_the_one_before(
    run: RunFolder, uninterrupted: Path, how: str
) -> None:
    last = run.checkpoint("last")
    assert [step_of(path) for path in (last, *checkpoint.previous(last))] == [38, 30]
    damage(last, how)
    bad = last.read_bytes()
    resume(run.path, reporter=(said := Lines()))
    assert said.lines[0] == f"{last} is damaged (now last.damaged): continuing from last-1.safetensors"
    assert f"continuing {run.path} after step 30" in said.lines
    assert last.with_suffix(".damaged").read_bytes() == bad
    assert outcome(run.path) == outcome(uninterrupted)


def test_one_that_is_missing_falls_back_too(run: RunFolder, uninterrupted: Path) -> None:
    run.checkpoint("last").unlink()
    resume(run.path, reporter=(said := Lines()))
    assert said.lines[0] == f"there is no {run.checkpoint('last')}: continuing from last-1.safetensors"
    assert outcome(run.path) == outcome(uninterrupted)


def test_the_best_one_is_the_last_choice(run: RunFolder, uninterrupted: Path) -> None:
    last = run.checkpoint("last")
    for path in (last, *checkpoint.previous(last)):
        damage(path)
    resume(run.path, reporter=(said := Lines()))
    assert said.lines[0] == f"{last} is damaged (now last.damaged): continuing from best.safetensors"
    assert outcome(run.path) == outcome(uninterrupted)


def test_if_all_are_damaged_nothing_is_changed(run: RunFolder) -> None:
    for path in (run.path / "checkpoints").iterdir():
        damage(path)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"last\.safetensors is damaged, and so is .*: start a new run"):
        resume(run.path)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_checkpoints_by_time(
    text: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every reading of the clock is a minute later, so a checkpoint is due at every second step."""
    minutes = iter(range(10**6))

    class Time:
        monotonic = staticmethod(lambda: 60.0 * next(minutes))

    monkeypatch.setattr(loop, "time", Time)
    steps: list[int] = []
    save = checkpoint.save

    def note(path: Path, tensors: Any, facts: Any, keep: int = 1) -> None:
        if path.stem == "last":
            steps.append(facts["progress"]["step"])
        save(path, tensors, facts, keep)

    monkeypatch.setattr(checkpoint, "save", note)
    config = small_config(text, training__checkpoint_every=0, training__checkpoint_minutes=1)
    train(config, tmp_path / "run")
    assert steps == [*range(2, 43, 2), 43]
    assert outcome(tmp_path / "run") == outcome(uninterrupted)
    steps.clear()
    train(small_config(text, training__checkpoint_every=0, training__checkpoint_minutes=0), tmp_path / "none")
    assert steps == [43]


IMPATIENT = {
    "training__evaluate_every": 3,
    "training__patience": 2,
    "stage__0__optimizer": "sgd",
    "stage__0__learning_rate": 1e-20,  # the weights stay as they are, and the score with them
}


def test_early_stopping(text: Path, tmp_path: Path) -> None:
    config, run = small_config(text, **IMPATIENT), RunFolder(tmp_path / "run")
    train(config, run.path, reporter=(said := Lines()))
    assert "stopping early: no better score in 2 evaluations since step 3" in said.lines
    assert [line["step"] for line in metrics(run.path) if line["kind"] == "valid"] == [3, 6, 9]
    assert step_of(run.checkpoint("last")) == 9
    assert run.final() is not None
    assert is_finished(run)
    resume(run.path, reporter=(again := Lines()))
    expected = "it had no better score in 2 evaluations; to go on, raise training.patience"
    assert again.lines == [f"{run.path} is finished: {expected}"]
    # With more patience it goes on.
    assert main(["train", "--resume", str(run.path), "--training.patience", "4"]) == 0
    assert [line["step"] for line in metrics(run.path) if line["kind"] == "valid"] == [3, 6, 9, 12, 15]


@pytest.mark.parametrize("words", ["step 4 ", "step 7 ", "step 9 ", "scoring test"])
def test_early_stopping_is_exact_with_resume(text: Path, tmp_path: Path, words: str) -> None:
    config = small_config(text, **IMPATIENT)
    train(config, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", reporter=Signals(words, signal.SIGTERM))
    resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_better_score_renews_the_patience(text: Path, uninterrupted: Path, tmp_path: Path) -> None:
    train(small_config(text, training__patience=1), tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(uninterrupted)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"training__patience": 2, "training__evaluate_every": 0}, "set evaluate_every too"),
        ({"training__patience": -1}, "patience must not be negative"),
        ({"training__keep_checkpoints": 0}, "keep_checkpoints must be at least 1"),
        ({"training__checkpoint_minutes": -1}, "checkpoint_minutes must not be negative"),
    ],
)
def test_options_that_make_no_sense(text: Path, options: dict[str, int], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        small_config(text, **options)


def test_a_finished_run_is_extended(
    text: Path, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second stage keeps its rate after the warm-up, so its length changes nothing before its end."""
    run = tmp_path / "run"
    train(small_config(text, stage__1__steps=10), run)
    assert main(["train", "--resume", str(run), "--stage.1.steps", "18"]) == 0
    shown = capsys.readouterr().out
    assert f"changed in {run}/config.toml: stage.1.steps 10 -> 18\n" in shown
    assert "a sample:" in shown
    assert outcome(run)["last"][1] == outcome(uninterrupted)["last"][1]
    assert RunFolder(run).config.stage[1].steps == 18
    assert main(["train", "--resume", str(run), "--stage.1.steps", "18"]) == 0
    assert capsys.readouterr().out == f"{run} is finished: nothing to do\n"


def test_so_is_one_with_a_damaged_checkpoint(run: RunFolder) -> None:
    resume(run.path)
    damage(run.checkpoint("last"))
    assert is_finished(run)
    assert main(["train", "--resume", str(run.path), "--stage.1.steps", "20"]) == 0
    assert [line["step"] for line in metrics(run.path) if line["kind"] == "train"][-1] == 45
    assert step_of(run.checkpoint("last")) == 45


@pytest.mark.parametrize(
    ("words", "status", "complaint"),
    [
        (["--model.width", "32"], 1, "the command has model.width = 32, but the run began with 16"),
        (["--stage.7.steps", "9"], 2, "'7' is not one of the 2 entries"),
        (["--stage.1.stepps", "9"], 2, "unknown key 'stage.1.stepps'"),
        (["--data", "x.txt"], 2, "leave out all other options, except dotted ones such as --stage.0.steps"),
    ],
)
def test_what_cannot_be_changed(
    run: RunFolder, words: list[str], status: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert main(["train", "--resume", str(run.path), *words]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
