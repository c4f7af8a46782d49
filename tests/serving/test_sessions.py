"""Sessions: states by id, in memory, on disk, and forked."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from longspan.errors import UserError
from longspan.language_model import LoadedModel
from longspan.serving.limits import BadState, Limits, NoSuchSession, SessionTooLarge, TooManySessions
from longspan.serving.sessions import SUFFIX, Session, Sessions
from tests import forks
from tests.serving.small_models import loaded


@pytest.fixture(scope="module")
def lm() -> LoadedModel:
    return loaded("modern, n-grams")


def size_of(lm: LoadedModel) -> int:
    return Sessions({"m": lm}, Limits()).create("m", lm.read("a")).bytes


def texts(sessions: Sessions, lm: LoadedModel, *ids: str) -> list[str]:
    return [lm.generate("", 20, seed=1, state=sessions.state(id)) for id in ids]


def expected(lm: LoadedModel, text: str) -> str:
    return lm.generate(text, 20, seed=1)


def test_a_session_is_the_state_after_its_text(lm: LoadedModel) -> None:
    sessions = Sessions({"m": lm}, Limits())
    made = sessions.create("m", lm.read("abcab"), "abcab")
    assert (len(made.id), made.model, made.tokens, made.text_tail) == (22, "m", 5, "abcab")
    assert (made.saved, made.in_memory) == (False, True)
    assert texts(sessions, lm, made.id) == [expected(lm, "abcab")]
    later = sessions.update(made.id, lm.read("de", sessions.state(made.id)), "abcabde")
    assert (later.id, later.tokens, later.text_tail) == (made.id, 7, "abcabde")
    assert later.created == made.created < later.last_used
    assert texts(sessions, lm, made.id) == [expected(lm, "abcabde")]
    other = sessions.create("m", lm.read("f"))
    assert [one.id for one in sessions.list()] == [other.id, made.id]
    sessions.delete(made.id)
    assert [one.id for one in sessions.list()] == [other.id]
    for use in (sessions.get, sessions.state, sessions.fork, sessions.delete, sessions.save, sessions.export):
        with pytest.raises(NoSuchSession, match="there is no such session"):
            use(made.id)


def test_two_hundred_forks_take_the_memory_of_one(lm: LoadedModel) -> None:
    size = size_of(lm)
    sessions = Sessions({"m": lm}, Limits(session_bytes=3 * size))
    first = sessions.create("m", lm.read("abc"), "abc")
    forks = [sessions.fork(first.id) for _ in range(200)]
    assert sessions.memory_bytes == size
    assert len({fork.id for fork in forks}) == 200
    assert all(fork.in_memory and fork.tokens == 3 for fork in forks)
    for number, fork in enumerate(forks[:10]):  # they diverge
        sessions.update(fork.id, lm.read("abcdefghij"[number], sessions.state(fork.id)))
        assert sessions.memory_bytes <= 3 * size
    assert texts(sessions, lm, first.id, forks[50].id, forks[3].id) == [
        *2 * [expected(lm, "abc")],
        expected(lm, "abcd"),
    ]
    for fork in forks:
        sessions.delete(fork.id)
    assert texts(sessions, lm, first.id) == [expected(lm, "abc")]
    assert sessions.memory_bytes == size


@pytest.mark.parametrize("has_folder", [True, False])
def test_the_least_recently_used_go_to_disk_and_come_back(
    lm: LoadedModel, tmp_path: Path, *, has_folder: bool
) -> None:
    size, folder = size_of(lm), tmp_path / "sessions" if has_folder else None
    sessions = Sessions({"m": lm}, Limits(session_bytes=2 * size), folder)
    made = [sessions.create("m", lm.read(letter)) for letter in "abcdef"]
    assert [sessions.get(one.id).in_memory for one in made] == [False] * 4 + [True] * 2
    assert sessions.memory_bytes == 2 * size
    assert texts(sessions, lm, *(one.id for one in made)) == [expected(lm, letter) for letter in "abcdef"]
    sessions.state(made[0].id)
    sessions.create("m", lm.read("g"))
    assert [sessions.get(one.id).in_memory for one in made] == [True] + [False] * 5
    assert all(sessions.get(one.id).bytes == size for one in made)
    if folder is not None:
        assert len(list(folder.glob(".spilled*/*"))) >= 5
        for one in made:
            sessions.delete(one.id)
        assert not list(folder.glob(".spilled*/*"))
        sessions.close()
        assert list(folder.iterdir()) == []


def test_what_is_too_much_is_refused(lm: LoadedModel) -> None:
    size = size_of(lm)
    sessions = Sessions({"m": lm}, Limits(sessions=2, session_bytes=size, upload_bytes=100))
    first = sessions.create("m", lm.read("a"))
    sessions.fork(first.id)
    for more in (lambda: sessions.fork(first.id), lambda: sessions.create("m", lm.read("b"))):
        with pytest.raises(TooManySessions, match="there are 2 sessions already"):
            more()
    with pytest.raises(BadState, match="more than 100 bytes"):
        sessions.load(sessions.export(first.id), "m")
    with pytest.raises(SessionTooLarge, match="larger than the memory for sessions"):
        Sessions({"m": lm}, Limits(session_bytes=size - 1)).create("m", lm.read("a"))
    with pytest.raises(UserError, match="--sessions FOLDER"):
        sessions.save(first.id)


def test_saved_sessions_are_found_again(lm: LoadedModel, tmp_path: Path) -> None:
    size, other = size_of(lm), loaded("adaptive-span")
    sessions = Sessions({"m": lm, "o": other}, Limits(session_bytes=2 * size), tmp_path)
    saved = sessions.save(sessions.create("m", lm.read("abc"), "äbc").id)
    of_other = sessions.save(sessions.create("o", other.read("abc")).id)
    unsaved = [sessions.create("m", lm.read(letter)) for letter in "abcd"]  # some go to disk
    assert saved.saved
    again = Sessions({"renamed": lm}, Limits(), tmp_path)  # the first one was killed
    (found,) = again.list()
    assert (found.id, found.model, found.tokens, found.text_tail) == (saved.id, "renamed", 3, "äbc")
    assert (found.saved, found.in_memory, found.created) == (True, False, saved.created)
    assert texts(again, lm, saved.id) == [expected(lm, "abc")]
    assert texts(sessions, lm, unsaved[0].id) == [expected(lm, "a")]  # the other server is still alive
    again.delete(saved.id)
    again.close()
    sessions.close()
    assert [path.name for path in tmp_path.iterdir()] == [of_other.id + SUFFIX]


def test_a_saved_file_keeps_its_state_while_the_session_goes_on(lm: LoadedModel, tmp_path: Path) -> None:
    sessions = Sessions({"m": lm}, Limits(), tmp_path)
    made = sessions.create("m", lm.read("ab"))
    sessions.save(made.id)
    assert not sessions.update(made.id, lm.read("abc")).saved
    assert texts(Sessions({"m": lm}, Limits(), tmp_path), lm, made.id) == [expected(lm, "ab")]
    assert sessions.save(made.id).saved
    assert texts(Sessions({"m": lm}, Limits(), tmp_path), lm, made.id) == [expected(lm, "abc")]


def test_forks_of_a_saved_session_outlive_its_file(lm: LoadedModel, tmp_path: Path) -> None:
    saved = Sessions({"m": lm}, Limits(), tmp_path)
    ids = [saved.create("m", lm.read(text)).id for text in ("ab", "cd")]
    for id in ids:
        saved.save(id)
    sessions = Sessions({"m": lm}, Limits(session_bytes=size_of(lm)), tmp_path)
    forks = [sessions.fork(id).id for id in ids]
    assert not sessions.get(forks[0]).in_memory
    sessions.update(ids[0], lm.read("abc"))
    sessions.save(ids[0])  # its file is replaced
    sessions.delete(ids[1])  # its file is removed
    assert texts(sessions, lm, *forks, ids[0]) == [expected(lm, text) for text in ("ab", "cd", "abc")]


def test_a_damaged_session_is_refused_and_can_be_deleted(lm: LoadedModel, tmp_path: Path) -> None:
    first = Sessions({"m": lm}, Limits(), tmp_path)
    ids = [first.save(first.create("m", lm.read("abc")).id).id for _ in range(3)]
    paths = [tmp_path / f"{id}{SUFFIX}" for id in ids]
    paths[0].write_bytes(paths[0].read_bytes()[:-1] + b"?")
    paths[1].write_bytes(b"\xff" * 20)
    (tmp_path / f"{'x' * 22}{SUFFIX}").mkdir()
    (tmp_path / f"../{'y' * 22}{SUFFIX}").write_bytes(b"")
    sessions = Sessions({"m": lm}, Limits(), tmp_path)
    assert {one.id for one in sessions.list()} == {ids[0], ids[2]}
    with pytest.raises(BadState, match="damaged"):
        sessions.state(ids[0])
    sessions.delete(ids[0])
    paths[2].unlink()
    with pytest.raises(BadState, match="cannot be read: No such file"):
        sessions.state(ids[2])


def test_export_and_load(lm: LoadedModel) -> None:
    sessions = Sessions({"m": lm}, Limits())
    made = sessions.create("m", lm.read("abcde"), "abcde")
    copy = sessions.load(sessions.export(made.id), "m")
    assert copy.id != made.id
    assert (copy.tokens, copy.text_tail) == (5, "abcde")
    assert texts(sessions, lm, copy.id) == [expected(lm, "abcde")]


def test_many_threads_at_once(lm: LoadedModel, tmp_path: Path) -> None:
    sessions = Sessions({"m": lm}, Limits(session_bytes=3 * size_of(lm)), tmp_path)
    problems: list[BaseException] = []

    def use(letter: str) -> None:
        try:
            mine = sessions.create("m", lm.read(letter))
            for _ in range(5):
                fork = sessions.fork(mine.id)
                state = sessions.state(fork.id)
                assert torch.equal(state.hidden_D, lm.read(letter).hidden_D)
                sessions.save(fork.id)
                sessions.delete(fork.id)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=use, args=(letter,)) for letter in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []
    assert len(sessions.list()) == 8


def save_again_and_again(folder: Path) -> None:
    torch.set_num_threads(1)
    lm = loaded("modern, n-grams")
    sessions = Sessions({"m": lm}, Limits(session_bytes=30_000), folder)
    made = sessions.create("m", lm.read("a"))
    print(made.id, flush=True)
    for number in range(10**6):
        sessions.update(made.id, lm.read("abcde"[number % 5]), "abcde"[number % 5])
        sessions.save(made.id)
        sessions.create("m", lm.read("b")) if number < 5 else None
        if number == 8:
            print("saved", flush=True)


def test_a_kill_between_writes_leaves_a_whole_session(lm: LoadedModel, tmp_path: Path) -> None:
    """Waits for a process to save again and again, and kills it."""
    os.mkfifo(tmp_path / "said")
    process = forks.start(save_again_and_again, tmp_path / "sessions", out=tmp_path / "said")
    with open(tmp_path / "said") as said:
        id = said.readline().strip()
        assert said.readline() == "saved\n"
        process.kill()
        assert forks.finish(process, 60) == -signal.SIGKILL
    sessions = Sessions({"m": lm}, Limits(), tmp_path / "sessions")
    (found,) = sessions.list()
    assert isinstance(found, Session)
    assert found.id == id
    assert texts(sessions, lm, id) == [expected(lm, found.text_tail)]
    sessions.save(sessions.update(id, lm.read("abc")).id)
    sessions.close()
    left = [path.name for path in (tmp_path / "sessions").iterdir()]
    assert left == [id + SUFFIX]  # nothing of the dead process
