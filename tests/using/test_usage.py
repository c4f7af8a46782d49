"""Exit statuses, `~` in paths, missing parents of new folders, and suggestions by meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from longspan.cli import main
from longspan.home import home
from tests.using.test_cli import complaint, misuse
from tests.using.tiny import run_folder


@pytest.mark.parametrize(
    "words",
    [
        ["trian"],
        ["train", "--nothing"],
        ["train", "--model.widht", "8"],
        ["train", "--model.width", "wide"],
        ["train", "--model.width"],
        ["train", "--name", "a/b"],
        ["train", "--or-resume"],
        ["train", "--resume", "run", "--data", "x.txt"],
        ["eval"],
        ["eval", "run", "--checkpoint", "first"],
        ["generate", "run", "--tokens", "many"],
        ["generate", "run", "--temperature", "-1"],
        ["data"],
        ["data", "info", "python", "--tokenizer", "syllable"],
        ["bench", "--steps", "0"],
        ["cutoffs", "--clusters", "3"],
        ["import", "file"],
    ],
)
def test_mistakes_in_the_words_of_a_command_have_status_2(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    misuse(capsys, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["train", "no-such-recipe"],
        ["train", "--data", "nowhere.txt"],
        ["train", "bad.toml", "--training.seed", "3"],
        ["eval", "nowhere"],
        ["generate", "nowhere"],
        ["data", "get", "nothing"],
    ],
)
def test_other_failures_have_status_1(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("[model]\nwidht = 8\n")
    complaint(capsys, *words)


def test_a_tilde_is_the_home_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    run_folder(tmp_path / "run")
    assert main(["spans", "~/run", "--out=~/mine.png"]) == 0
    assert (tmp_path / "mine.png").is_file()
    assert main(["spans", "~/run", "--freeze=~/frozen"]) == 0
    assert (tmp_path / "frozen" / "config.toml").is_file()
    assert main(["generate", "~/frozen", "--tokens", "1"]) == 0
    assert f"{tmp_path}/run exists already" in complaint(capsys, "train", "--out=~/run")
    monkeypatch.setenv("LONGSPAN_HOME", "~/cache")
    assert home() == tmp_path / "cache"
    assert list((tmp_path / "here").iterdir()) == []


def test_a_new_folder_needs_an_existing_parent(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "run")
    before = sorted(tmp_path.iterdir())
    asked = f"there is no folder {tmp_path / 'rusn'}: create it, or choose an existing one for mine"
    for command in (
        ["train", "--out", "rusn/mine"],
        ["search", "--out", "rusn/mine"],
        ["spans", "run", "--out", "a.png", "--freeze", "rusn/mine"],
        ["import", "file", "--kind", "sha-rnn", "--out", "rusn/mine"],
    ):
        assert main(command) == 1
        assert asked in capsys.readouterr().err
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "a.png"] == before


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        (["train", "--lr", "1"], "--stage.0.learning-rate"),
        (["train", "--layers", "4"], "--model.num-layers"),
        (["train", "--output", "x"], "did you mean '--out'?"),
        (["generate", "run", "--max-new-tokens", "5"], "did you mean '--tokens'?"),
        (["generate", "run", "--topk", "5"], "did you mean '--top-k'?"),
        (["generate", "run", "--tempreature", "5"], "did you mean '--temperature'?"),
    ],
)
def test_suggestions_are_by_meaning(
    words: list[str], suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suggestion in misuse(capsys, *words)


@pytest.mark.parametrize(
    "words", [["generate", "--run", "x"], ["eval", "--run", "x"], ["bench", "--lr", "x"], ["data", "--on"]]
)
def test_or_there_is_none(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean" not in misuse(capsys, *words)
