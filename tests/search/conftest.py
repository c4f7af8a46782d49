"""The small search, run once from the command line without any interruption."""

from __future__ import annotations

from pathlib import Path

import pytest

from longspan.search import Searching
from longspan.training import train

from ..training.runs import write_text
from .searches import search_config


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a search that nothing happened to, before anybody has looked for its findings."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGSPAN_HOME", str(folder / "home"))
        return train(search_config(text), folder / "hunt", strategy=Searching).path
