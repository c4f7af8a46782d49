"""Several processes that share a LONGSPAN_HOME lose nothing of each other's."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longspan.cli import main
from longspan.config import DataConfig, TokenizerConfig
from longspan.data import corpora, named_paths, preparation, prepare
from longspan.data.corpus import SPLITS
from longspan.files import locked, whole_file
from longspan.home import home

PROCESSES = 6
FORK = multiprocessing.get_context("fork")


def together(work: Callable[[int], None], processes: int = PROCESSES) -> list[int]:
    """Run `work(number)` in processes that begin at the same moment; their exit statuses."""
    begin = FORK.Barrier(processes)

    def child(number: int) -> None:
        begin.wait()
        work(number)

    children = [FORK.Process(target=child, args=(number,)) for number in range(processes)]
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
        for turn in range(5):
            assert main(["data", "add", f"name-{number}-{turn}", str(text)]) == 0

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


@pytest.mark.parametrize("locks", [True, False])
def test_eight_preparations_at_once_have_one_whole_result(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """With locks one process does the work; without, the first whole result is kept."""
    if not locks:
        monkeypatch.setattr("fcntl.flock", no_locks)
    config = DataConfig(corpus=str(text), tokenizer=TokenizerConfig(kind="word"))
    real = preparation.write_token_file

    def slow(path: Path, tokenizer: Any, chunks: Any) -> Any:
        time.sleep(0.1)  # all are at work at once
        return real(path, tokenizer, chunks)

    monkeypatch.setattr(preparation, "write_token_file", slow)

    def prepared(number: int) -> None:
        lines: list[str] = []
        corpus = prepare(config, lines.append)
        (tmp_path / f"{number}.lines").write_text("\n".join(lines))
        (tmp_path / f"{number}.tokens").write_bytes(corpus.splits["train"].tokens.tobytes())

    assert together(prepared, 8) == [0] * 8
    [folder] = (home() / "tokens").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [
        "corpus.json",
        "test.tokens",
        "tokenizer",
        "train.tokens",
        "valid.tokens",
    ]
    expected = (folder / "train.tokens").read_bytes()
    assert len({(tmp_path / f"{number}.tokens").read_bytes() for number in range(8)} | {expected}) == 1
    said = [(tmp_path / f"{number}.lines").read_text() for number in range(8)]
    assert sum("word tokens" in lines for lines in said) == (1 if locks else 8)
    assert sum("waiting for another process" in lines for lines in said) == (7 if locks else 0)
    preparation.forget_checks()
    assert prepare(config).folder == folder


def no_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_who_waits_takes_over_if_the_other_process_is_killed(text: Path, tmp_path: Path) -> None:
    config = DataConfig(corpus=str(text))
    real = preparation.write_token_file
    at_work = FORK.Event()

    def stuck(*arguments: Any) -> Any:
        at_work.set()
        time.sleep(60)

    def killed() -> None:
        preparation.write_token_file = stuck
        prepare(config)

    first = FORK.Process(target=killed)
    first.start()
    assert at_work.wait(30)
    assert preparation.write_token_file is real
    threading.Timer(0.3, first.kill).start()
    lines: list[str] = []
    folder = prepare(config, lines.append).folder
    assert lines[0] == "waiting for another process that prepares text"
    first.join(30)
    assert [path for path in folder.parent.iterdir() if path.suffix != ".part"] == [folder]
    assert b"".join(prepare(config).splits[split].tokens.tobytes() for split in SPLITS) == text.read_bytes()


def test_a_writer_in_a_container_with_our_host_name_is_not_disturbed(tmp_path: Path) -> None:
    """Its process id means nothing here: no process has it, but it is alive."""
    with whole_file(tmp_path / "file") as partial:
        left = partial.with_name(partial.name.replace(f".{os.getpid()}.", ".4194305."))
        container = left.with_name(left.name.replace(".part", "7.part"))
        left.touch()
        container.touch()
    with whole_file(tmp_path / "file"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"file", container.name}


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
