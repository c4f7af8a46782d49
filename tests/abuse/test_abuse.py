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

Snapshot = dict[str, tuple[int, int]]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Snapshot]:
    """What is in the folder `now`: after one mistake, and so before the next."""
    return {"now": dict(snapshot(folder))}


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name for mistake in MISTAKES])
def test_a_mistake_is_one_line_and_writes_nothing(
    mistake: Mistake,
    folder: Path,
    found: dict[str, Snapshot],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        status = main(mistake.words)
    said = capfd.readouterr().err
    before, found["now"] = found["now"], dict(snapshot(folder))
    assert found["now"] == before
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
    skipped = {str(folder / "home" / name) for name in CACHES}
    places = [str(folder)]
    while places:
        with os.scandir(places.pop()) as entries:
            for entry in entries:
                if entry.path in skipped:
                    continue
                facts = entry.stat(follow_symlinks=False)
                yield entry.path, (facts.st_size, facts.st_mtime_ns)
                if entry.is_dir(follow_symlinks=False):
                    places.append(entry.path)


def test_the_table_is_large_and_covers_every_subcommand() -> None:
    assert len(MISTAKES) == len(set(MISTAKES)) >= 250
    used = Counter(mistake.words[0] for mistake in MISTAKES)
    assert all(used[command] >= 10 for command, *_ in COMMANDS.values())
