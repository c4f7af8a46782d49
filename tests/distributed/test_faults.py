"""Signals and faults in runs of two processes: one clear line, nothing lost, and the run can be continued."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longspan import distributed
from longspan.config import RunConfig
from longspan.errors import UserError
from longspan.training import train
from tests.training.runs import outcome, small_config, write_text

from .cases import torchrun
from .elastic import Kill, command, victim, write_recipe

STEPS = (60, 40)
TWO = ["--nproc-per-node", "2"]
EITHER = [pytest.param(0, marks=pytest.mark.faults), 1]  # each rank once in 'make test-faults'


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"training__batch_size": 6}, "6 lanes cannot be divided over 4 processes: .* a multiple of 4"),
        (
            {"training__batch_size": 8, "training__micro_batches": 4},
            "training.micro_batches is 4, but each of 4 processes has only 2 lanes of the batch: lower it",
        ),
    ],
)
def test_a_batch_that_cannot_be_divided(
    options: dict[str, int], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: RunConfig = small_config(write_text(tmp_path), **options)
    monkeypatch.setattr(distributed, "size", lambda: 4)
    with pytest.raises(UserError, match=complaint):
        train(config, tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


class Training:
    """torchrun with two processes that train, in the background."""

    def __init__(self, recipe: Path, run: Path, *words: str) -> None:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", *TWO]
        self._run, self._log = run, run.with_suffix(".log")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*start, *(words or ["-m", "longspan", *command(recipe, run)])], stdout=log, stderr=log
            )

    def wait_for_step(self, step: int) -> None:
        metrics, until = self._run / "metrics.jsonl", time.monotonic() + 90
        while not (metrics.exists() and re.search(rf'"step": ?{step}\b', metrics.read_text())):
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < until, self.said()
            time.sleep(0.005)

    def wait_for(self, words: str) -> None:
        until = time.monotonic() + 90
        while words not in self.said():
            assert time.monotonic() < until, self.said()
            time.sleep(0.05)

    def workers(self) -> list[int]:
        """Process ids, in the order of ranks."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(word) for word in text.split()]

    def said(self) -> str:
        return self._log.read_text()

    def end(self) -> int:
        return self.process.wait(timeout=120)


def lines(said: str) -> list[str]:
    """What longspan says on stderr."""
    return [line for line in said.splitlines() if line.startswith("longspan: ")]


def once(said: str) -> str:
    """The one thing that is said. A slow machine may let rank 1 repeat it before torchrun ends it."""
    (told,) = {line.removeprefix("longspan: ").removeprefix("rank 1: ") for line in lines(said)}
    return told


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def progress(run: Path) -> int:
    """The step of the newest checkpoint."""
    facts = json.loads((run / "checkpoints" / "last.safetensors" / "facts.json").read_text())
    return int(facts["facts"]["progress"]["step"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder


@pytest.fixture(scope="module")
def recipe(place: Path) -> Path:
    return write_recipe(place, steps=STEPS, log_every=1, checkpoint_every=8, keep_checkpoints=2)


@pytest.fixture(scope="module")
def whole(place: Path, recipe: Path) -> Path:
    """A run that nothing happened to."""
    done = torchrun([*TWO, "-m", "longspan", *command(recipe, place / "whole")])
    assert done.returncode == 0, done.stderr
    return place / "whole"


def stopped(recipe: Path, run: Path, number: int = signal.SIGTERM, *, worker: int | None = None) -> Training:
    """A run that got a signal after step 20, as torchrun or as one of its workers."""
    training = Training(recipe, run)
    training.wait_for_step(20)
    os.kill(training.process.pid if worker is None else training.workers()[worker], number)
    assert training.end() != 0
    return training


def assert_continues(recipe: Path, run: Path, whole: Path) -> None:
    done = torchrun([*TWO, "-m", "longspan", *command(recipe, run)])
    assert done.returncode == 0, done.stderr
    assert outcome(run) == outcome(whole)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("number", "worker"),
    [
        (signal.SIGTERM, None),
        pytest.param(signal.SIGINT, None, marks=pytest.mark.faults),
        pytest.param(signal.SIGHUP, None, marks=pytest.mark.faults),
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.faults),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.faults),
    ],
)
@pytest.mark.usefixtures("hangups")
def test_a_signal(number: int, worker: int | None, recipe: Path, whole: Path, tmp_path: Path) -> None:
    """Sent to torchrun, or to one process: all save at the same step and leave."""
    run = tmp_path / "run"
    training = stopped(recipe, run, number, worker=worker)
    said = (
        f"longspan: stopped by {signal.Signals(number).name}; continue with 'torchrun ... -m longspan train"
    )
    assert [line.startswith(said) for line in lines(training.said())] == [True]
    assert 20 <= progress(run) == max(steps(run)) < sum(STEPS)  # not a step is lost
    assert_continues(recipe, run, whole)


@pytest.mark.faults
@pytest.mark.usefixtures("hangups")
def test_a_signal_to_all_processes(recipe: Path, whole: Path, tmp_path: Path) -> None:
    """As from a terminal, or from Slurm: every process gets it, and again from torchrun."""
    training = Training(recipe, tmp_path / "run")
    training.wait_for_step(20)
    for process in (*training.workers(), training.process.pid):
        os.kill(process, signal.SIGTERM)
    assert training.end() != 0
    assert progress(tmp_path / "run") == max(steps(tmp_path / "run"))
    assert_continues(recipe, tmp_path / "run", whole)


def failed(tmp_path: Path, recipe: Path, kill: Kill) -> str:
    """What is printed when a fault happens without --max-restarts."""
    done = torchrun([*TWO, *victim(tmp_path, [kill], recipe, tmp_path / "run")], timeout=120)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kill", "line"),
    [
        ((1, "full_disk_in_a_shard", 4), "No space left on device (rank 1)"),
        pytest.param(
            (0, "full_disk_in_a_shard", 4), "No space left on device (rank 0)", marks=pytest.mark.faults
        ),
        ((0, "read_only_folder", 4), "Read-only file system (rank 0)"),
    ],
)
def test_a_checkpoint_that_cannot_be_written(
    kill: Kill, line: str, recipe: Path, whole: Path, tmp_path: Path
) -> None:
    said = failed(tmp_path, recipe, kill)
    last = tmp_path / "run" / "checkpoints" / "last.safetensors"
    told = once(said)
    assert told.startswith("could not write the checkpoint ")
    assert told.endswith(line)
    assert "longspan/training" not in said  # no traceback of ours; torchrun has its own
    assert last.is_dir()
    assert not [*last.parent.glob(".*")]
    assert_continues(recipe, tmp_path / "run", whole)


@pytest.mark.distributed
@pytest.mark.parametrize("rank", EITHER)
def test_a_rank_that_fails(rank: int, recipe: Path, whole: Path, tmp_path: Path) -> None:
    """All end at once. The report of torchrun says which rank failed first, and why."""
    said = failed(tmp_path, recipe, (rank, "error_after_an_update", 12))
    cause = said.partition("Root Cause")[2]
    assert f"rank      : {rank} " in cause
    assert "LookupError: no such thing" in cause
    assert_continues(recipe, tmp_path / "run", whole)


@pytest.mark.distributed
@pytest.mark.parametrize("rank", EITHER)
def test_a_rank_that_is_killed(rank: int, recipe: Path, whole: Path, tmp_path: Path) -> None:
    said = failed(tmp_path, recipe, (rank, "after_an_update", 12))
    cause = said.partition("Root Cause")[2]
    assert f"rank      : {rank} " in cause
    assert "Signal 9 (SIGKILL)" in cause
    assert_continues(recipe, tmp_path / "run", whole)


@pytest.mark.distributed
@pytest.mark.parametrize("rank", EITHER)
def test_a_rank_that_hangs(rank: int, tmp_path: Path) -> None:
    recipe, run = write_recipe(tmp_path, timeout_seconds=5), tmp_path / "run"
    training = Training(recipe, run, *victim(tmp_path, [(rank, "stopped_after_an_update", 12)], recipe, run))
    training.wait_for(f"rank {rank} did not answer for 5 seconds")
    for worker in training.workers():
        os.kill(worker, signal.SIGCONT)  # else torchrun waits half a minute before it kills it
    assert training.end() != 0


def truncate(checkpoint: Path) -> None:
    shard = max(checkpoint.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size // 2)


def flip_a_byte(checkpoint: Path) -> None:
    shard = max(checkpoint.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-7] ^= 1
    shard.write_bytes(content)


def remove_facts(checkpoint: Path) -> None:
    (checkpoint / "facts.json").unlink()


@pytest.mark.distributed
@pytest.mark.faults
def test_damaged_checkpoints(recipe: Path, whole: Path, tmp_path: Path) -> None:
    """The one before is taken, on all ranks, and it says so."""
    stopped(recipe, tmp_path / "run")
    damages: list[Callable[[Path], None]] = [truncate, flip_a_byte, remove_facts]
    for damage in damages:
        run = tmp_path / damage.__name__
        shutil.copytree(tmp_path / "run", run)
        damage(run / "checkpoints" / "last.safetensors")
        assert_continues(recipe, run, whole)
        told = "last.safetensors is damaged (now last.damaged): continuing from last-1.safetensors"
        assert told in (run / "log.txt").read_text()


@pytest.mark.distributed
@pytest.mark.faults
def test_a_text_that_vanishes(
    place: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running training goes on, since its tokens are mapped. To continue it, the text is needed again."""
    monkeypatch.setenv("LONGSPAN_HOME", str(tmp_path / "home"))
    recipe, run = write_recipe(tmp_path, steps=STEPS, log_every=1, checkpoint_every=8), tmp_path / "run"
    text = tmp_path / "text.txt"
    training = Training(recipe, run)
    training.wait_for_step(17)  # after the first evaluation: each split is mapped when it is first read
    shutil.rmtree(tmp_path / "home")
    text.rename(tmp_path / "gone.txt")
    training.wait_for_step(30)
    os.kill(training.process.pid, signal.SIGTERM)
    assert training.end() != 0
    before = progress(run)
    assert before >= 30

    done = torchrun([*TWO, "-m", "longspan", *command(recipe, run)])
    assert done.returncode != 0
    assert str(text) in once(done.stderr)
    assert progress(run) == before

    (tmp_path / "gone.txt").rename(text)
    assert_continues(recipe, run, whole)
