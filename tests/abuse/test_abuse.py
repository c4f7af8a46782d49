"""Mistakes over all subcommands: each is one clear line and the right exit status, and writes nothing.

The commands run in this process, which is much faster; `test_processes.py` starts a few as real processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longspan.cli import main
from tests.abuse import workplace
from tests.abuse.mistake import Mistake
from tests.abuse.table import MISTAKES, STATUS_TODAY, WAITING

CACHES = ("tokens", "content")

pytestmark = pytest.mark.timeout(60)


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
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115  (closed with the process)


def cases() -> Iterator[Any]:
    for mistake in MISTAKES:
        waits = (
            [pytest.mark.xfail(run=False, reason=WAITING[mistake.name])] if mistake.name in WAITING else []
        )
        yield pytest.param(mistake, id=mistake.name, marks=waits)


@pytest.mark.parametrize("mistake", cases())
def test_a_mistake_is_one_line_and_writes_nothing(
    mistake: Mistake, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = dict(snapshot(folder))
    status = main(mistake.words)
    said = capfd.readouterr().err
    assert dict(snapshot(folder)) == before
    check(mistake, status, said)


def check(mistake: Mistake, status: int, said: str) -> None:
    """One line, after progress and warnings, that matches the pattern; the status is the wanted one."""
    assert "Traceback" not in said, said
    lines = [line for line in said.splitlines() if line.startswith("longspan: ")]
    lines = [line for line in lines if not line.startswith("longspan: warning: ")]
    assert len(lines) == 1, said
    assert said.endswith(f"{lines[0]}\n"), said
    assert re.search(mistake.line, lines[0]), said
    assert status in (mistake.status, STATUS_TODAY.get(mistake.status)), said


def snapshot(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Every file and folder below, with size and time; token files may be added, they are a cache."""
    for here, folders, files in os.walk(folder):
        if Path(here) == folder / "home":
            folders[:] = [name for name in folders if name not in CACHES]
        for name in (*folders, *files):
            facts = os.lstat(os.path.join(here, name))
            yield os.path.join(here, name), (facts.st_size, facts.st_mtime_ns)
