"""Several processes that share a LONGSPAN_HOME lose nothing of each other's."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longspan.cli import main
from longspan.config import DataConfig
from longspan.data import corpora, named_paths, preparation, prepare
from longspan.files import locked
from longspan.home import home

PROCESSES = 6
FORK = multiprocessing.get_context("fork")


def together(work: Callable[[int], None]) -> list[int]:
    """Run `work(number)` in six processes that begin at the same moment; their exit statuses."""
    begin = FORK.Barrier(PROCESSES)

    def child(number: int) -> None:
        begin.wait()
        work(number)

    children = [FORK.Process(target=child, args=(number,)) for number in range(PROCESSES)]
    for process in children:
        process.start()
    for process in children:
        process.join(60)
    return [process.exitcode or 0 for process in children]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("a line of text\n" * 200)
    return path


def test_every_name_is_kept(text: Path) -> None:
    def add(number: int) -> None:
        for time in range(5):
            assert main(["data", "add", f"name-{number}-{time}", str(text)]) == 0

    assert together(add) == [0] * PROCESSES
    assert len(named_paths.registered()) == 5 * PROCESSES


def test_nobody_removes_what_another_process_has_completed(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process finds an incomplete folder; before it removes it, another one has completed it."""
    config = DataConfig(corpus=str(text))
    folder = prepare(config).folder
    (folder / "test.tokens").unlink()
    real, completed = preparation._remove_incomplete, list[int]()

    def remove_later(*arguments: Any) -> bool:
        monkeypatch.setattr(preparation, "_remove_incomplete", real)
        prepare(config)
        completed.append(folder.stat().st_ino)
        return real(*arguments)

    monkeypatch.setattr(preparation, "_remove_incomplete", remove_later)
    assert len(prepare(config).splits["test"]) > 0
    assert [folder.stat().st_ino] == completed


def test_all_repair_an_incomplete_cache(text: Path) -> None:
    config = DataConfig(corpus=str(text))
    folder = prepare(config).folder
    (folder / "test.tokens").unlink()

    def prepared(number: int) -> None:
        assert len(prepare(config).splits["test"]) > 0

    assert together(prepared) == [0] * PROCESSES
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_lock_of_another_user_can_be_taken(text: Path) -> None:
    """It may be a file that this user can only read."""
    corpora.add("one", text)
    lock = home() / ".corpora.json.lock"
    lock.chmod(0o444)
    corpora.add("two", text)
    assert set(named_paths.registered()) == {"one", "two"}


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    def killed() -> None:
        with locked(tmp_path / "file"):
            os._exit(9)

    process = FORK.Process(target=killed)
    process.start()
    process.join(60)
    assert process.exitcode == 9
    with locked(tmp_path / "file"):
        pass
