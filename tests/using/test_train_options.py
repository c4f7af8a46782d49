"""Options of commands that train, where a mistake would train the wrong thing or into the wrong place."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.config.modern import ModernConfig


@pytest.mark.parametrize("command", ["train", "search"])
@pytest.mark.parametrize("option", ["", "--data", "--name", "--out", "--resume"])
def test_an_empty_value_is_no_value(
    command: str,
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, *filter(None, [option]), ""]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"longspan: {option or 'RECIPE'} is empty: give it a value or leave it out\n"
    assert list(tmp_path.iterdir()) == []


def test_ngrams_have_an_upper_bound() -> None:
    assert ModernConfig(ngrams=(2, 64)).ngrams == (2, 64)
    with pytest.raises(ValueError, match="each at least 2 and at most 64"):
        ModernConfig(ngrams=(2, 65))


@pytest.mark.parametrize("command", ["train", "search"])
def test_a_wrong_path_shows_before_anything_heavy_is_imported(command: str, tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['longspan', *sys.argv[1:]]; from longspan.__main__ import main; "
        "print(main(), 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", code, command, "--data", "texts/nothing.txt"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout == "1 False\n"
    assert done.stderr == "longspan: there is no file or folder texts/nothing.txt\n"


def test_the_home_of_an_unknown_user_is_a_wrong_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--data", "~nobody-of-that-name/text.txt"]) == 1
    assert capsys.readouterr().err == "longspan: there is no file or folder ~nobody-of-that-name/text.txt\n"
