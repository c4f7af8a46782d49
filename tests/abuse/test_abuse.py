"""Mistakes over all subcommands: each is one clear line and the right exit status, and writes nothing.

The commands run in this process, which is much faster; `test_processes.py` starts a few as real processes.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from longspan.cli import main
from tests.abuse.general_mistakes import COMMANDS
from tests.abuse.mistake import Mistake
from tests.abuse.table import MISTAKES

CACHES = ("checked", "content", "tokens")

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name for mistake in MISTAKES])
def test_a_mistake_is_one_line_and_writes_nothing(
    mistake: Mistake, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(snapshot(folder))
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
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
    assert status == mistake.status, said


def snapshot(folder: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Every file and folder below, with size and time; files in caches may be added."""
    for here, folders, files in os.walk(folder):
        if Path(here) == folder / "home":
            folders[:] = [name for name in folders if name not in CACHES]
        for name in (*folders, *files):
            facts = os.lstat(os.path.join(here, name))
            yield os.path.join(here, name), (facts.st_size, facts.st_mtime_ns)


def test_the_table_is_large_and_covers_every_subcommand() -> None:
    assert len(MISTAKES) == len(set(MISTAKES)) >= 250
    used = Counter(mistake.words[0] for mistake in MISTAKES)
    assert all(used[command] >= 10 for command, *_ in COMMANDS.values())
