"""`longspan train ... --out RUN --or-resume`: begins a run, or goes on with it."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import tomli_w

from longspan.cli import main
from longspan.runs import RunFolder
from longspan.training import Interrupted, train
from tests.search.searches import search_table

from .runs import Signals, metrics, outcome, small_config, small_table
from .test_resume import Dies


@pytest.fixture
def recipe(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(tomli_w.dumps(small_table(text)))
    return "small.toml"


def command(recipe: str, *words: str) -> int:
    return main(["train", recipe, "--out", "run", "--name", "small", "--or-resume", *words])


def stop(text: Path, words: str = "step 12 ") -> None:
    with pytest.raises(Interrupted):
        train(small_config(text), Path("run"), reporter=Signals(words, signal.SIGINT))


def test_it_begins_and_is_finished(
    recipe: str, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(recipe) == 0
    assert outcome(Path("run")) == outcome(uninterrupted)
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert command(recipe) == 0
    assert capsys.readouterr().out == "run is finished: nothing to do\n"
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def test_a_finished_run_says_which_options_it_does_not_apply(
    recipe: str, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(uninterrupted, "run")
    before = Path("run/config.toml").read_bytes()
    steps = RunFolder.open(Path("run")).config.stage[1].steps
    assert command(recipe, "--stage.1.steps", "1") == 0
    said = f"run is finished: nothing to do (not applied: stage.1.steps {steps} -> 1)\n"
    assert capsys.readouterr().out == said
    assert Path("run/config.toml").read_bytes() == before


@pytest.mark.parametrize("words", ["step 12 ", "step 31 "])
def test_it_goes_on(
    recipe: str, text: Path, uninterrupted: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stop(text, words)
    before = Path("run/config.toml").read_bytes()
    assert command(recipe) == 0
    assert outcome(Path("run")) == outcome(uninterrupted)
    assert Path("run/config.toml").read_bytes() == before
    shown = capsys.readouterr().out
    assert f"continuing run after {words.strip()}" in shown
    assert "changed in" not in shown


def test_it_goes_on_before_the_first_checkpoint(recipe: str, text: Path, uninterrupted: Path) -> None:
    with pytest.raises(MemoryError):
        train(small_config(text), Path("run"), reporter=Dies("step 5 "))
    assert command(recipe) == 0
    assert outcome(Path("run")) == outcome(uninterrupted)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            ["--model.width", "32"],
            "the command has model.width = 32, but the run began with 16: put that back",
        ),
        (["--training.seed", "9"], "the command has training.seed = 9, but the run began with"),
        (
            ["--data.tokenizer.kind", "word"],
            "the command has data.tokenizer.kind = 'word', but the run began",
        ),
        (["--stage.0.optimizer", "sgd"], "the command has stage.0.optimizer = 'sgd'"),
        (["--init", "other"], "run did not start from other: leave out --init, or start a new run"),
        (["--resume", "run"], "leave out all other options"),
    ],
)
def test_options_that_cannot_change(
    recipe: str, text: Path, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stop(text)
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    assert command(recipe, *words) == (2 if words[0] == "--resume" else 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


def test_another_tokenizer_is_named_before_the_first_checkpoint(
    recipe: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MemoryError):
        train(small_config(text), Path("run"), reporter=Dies("step 5 "))
    assert command(recipe, "--data.tokenizer.kind", "word") == 1
    assert "the command has data.tokenizer.kind = 'word'" in capsys.readouterr().err


def test_options_that_may_change_are_stored(
    recipe: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(recipe) == 0
    capsys.readouterr()
    assert command(recipe, "--stage.1.steps", "20") == 0
    shown = capsys.readouterr().out
    assert "changed in run/config.toml: stage.1.steps 18 -> 20\n" in shown
    assert "a sample:" in shown
    assert RunFolder.open(Path("run")).config.stage[1].steps == 20
    assert [line["step"] for line in metrics(Path("run")) if line["kind"] == "train"][-1] == 45


def test_another_text_is_refused(
    recipe: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop(text)
    (tmp_path / "other.txt").write_text(text.read_text().replace("cat", "owl"))
    assert command(recipe, "--data", "other.txt") == 1
    assert "the text of other has changed since run began: start a new run" in capsys.readouterr().err


def test_what_is_no_run_folder(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    assert command(recipe) == 1
    assert capsys.readouterr().err == "longspan: run is not a run folder: it has no config.toml\n"
    Path("run").rmdir()
    Path("run").write_text("a file")
    assert command(recipe) == 1
    assert capsys.readouterr().err == "longspan: there is no run folder run: it is a file\n"
    assert Path("run").read_text() == "a file"


def test_with_initial_weights(
    recipe: str, text: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run that they come from may be gone on since, or have another tokenizer than the recipe."""
    table = small_table(text)
    table["data"]["tokenizer"] = {"kind": "word"}
    Path("words.toml").write_text(tomli_w.dumps(table))
    words = ["--init", str(uninterrupted), "--stage.0.steps", "3", "--stage.1.steps", "2"]
    assert command("words.toml", *words) == 0
    capsys.readouterr()
    assert command("words.toml", *words) == 0
    assert capsys.readouterr().out == "run is finished: nothing to do\n"
    other = ["--init", str(uninterrupted / "checkpoints" / "last.safetensors"), *words[2:]]
    assert command("words.toml", *other) == 1
    assert "run started from" in capsys.readouterr().err


def test_a_search(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    monkeypatch.chdir(tmp_path)
    table = search_table(text)
    table["stage"][0]["steps"], table["stage"][1]["steps"] = 4, 2
    Path("hunt.toml").write_text(tomli_w.dumps(table))
    for _ in range(2):
        assert main(["search", "hunt.toml", "--out", "run", "--or-resume"]) == 0
    assert [line["step"] for line in metrics(Path("run")) if line["kind"] == "final"] == [6]
