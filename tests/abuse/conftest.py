"""The folder in which mistakes are made, once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.abuse import workplace


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder `work`, and `home` beside it, which is LONGSPAN_HOME."""
    folder = tmp_path_factory.mktemp("abuse")
    (folder / "work").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "work")
        patch.setenv("LONGSPAN_HOME", str(folder / "home"))
        workplace.build(folder / "work")
    return folder


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "work")
    monkeypatch.setenv("LONGSPAN_HOME", str(folder / "home"))
