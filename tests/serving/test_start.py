"""What is served: names of runs, the folder of sessions, rules."""

from __future__ import annotations

from pathlib import Path

import pytest

from longspan.errors import UsageError, UserError
from longspan.serving.limits import Limits
from longspan.serving.start import named_runs, rules_for, sessions_folder


def test_runs_of_the_same_name_get_numbers(tmp_path: Path) -> None:
    folders = [tmp_path / part / "run" for part in "abc"]
    assert list(named_runs(folders)) == ["run", "run-2", "run-3"]
    assert named_runs(folders)["run-2"] == folders[1]


def test_a_run_that_is_given_twice(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    for again in ("run", "run/.", "link"):
        with pytest.raises(UsageError, match="given twice"):
            named_runs([tmp_path / "run", tmp_path / again])


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    assert list(named_runs([tmp_path / "a\udcff"])) == ["a?"]


def test_the_folder_of_sessions_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPAN_HOME", str(tmp_path))
    folder = sessions_folder(None)
    assert folder == tmp_path / "sessions"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(UserError, match="others can write to"):
        sessions_folder(None)


def test_a_given_folder_of_sessions(tmp_path: Path) -> None:
    assert sessions_folder(tmp_path / "mine").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="not a folder"):
        sessions_folder(tmp_path / "file")
    with pytest.raises(UserError, match="no folder"):
        sessions_folder(tmp_path / "no" / "where")


def test_rules() -> None:
    rules = rules_for(Limits(prompt_tokens=10), any_host=False, origins=["https://a.example"], key=b"k")
    assert rules.hosts == ("localhost", "127.0.0.1", "::1")
    assert rules.body_bytes == (1 << 20) + 320
    assert rules.upload_bytes == Limits().upload_bytes
    small = rules_for(Limits(session_bytes=1000), any_host=False, origins=[], key=None)
    assert small.upload_bytes == (1 << 20) + 1000
    assert small.all_bytes == 64 * small.body_bytes + small.upload_bytes
    assert rules_for(Limits(), any_host=True, origins=[], key=None).hosts is None
