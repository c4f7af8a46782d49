"""The small run, trained once without any interruption."""

from __future__ import annotations

from pathlib import Path

import pytest

from longspan.training import train

from .runs import small_config, write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGSPAN_HOME", str(folder / "home"))
        return train(small_config(text), folder / "run").path
