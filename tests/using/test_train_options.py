"""Options of commands that train, where a mistake would train the wrong thing or into the wrong place."""

from __future__ import annotations

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
