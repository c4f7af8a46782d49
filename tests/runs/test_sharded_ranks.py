"""Checkpoints of several processes: read by another number of them, faults of one, and kills."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from longspan.runs import RunFolder, checkpoint
from tests import forks

from . import rank_checks

KILLS = 8


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.distributed
def test_two_processes_write_and_one_reads(tmp_path: Path) -> None:
    forks.spawn(rank_checks.save_and_fail, (2, tmp_path), 2)
    loaded = checkpoint.load(RunFolder(tmp_path).checkpoint("last"))  # without a process group
    rank_checks.assert_same(loaded.tensors, rank_checks.all_tensors(2))


@pytest.mark.distributed
@pytest.mark.parametrize(("saved", "others"), [(2, [4, 1]), (4, [2])])
def test_other_numbers_of_processes_read(saved: int, others: list[int], tmp_path: Path) -> None:
    forks.spawn(rank_checks.save_and_fail, (saved, tmp_path), saved)
    for ranks in others:
        forks.spawn(rank_checks.read, (ranks, tmp_path, saved), ranks)
    loaded = checkpoint.load(RunFolder(tmp_path).checkpoint("last"))
    rank_checks.assert_same(loaded.tensors, rank_checks.all_tensors(saved))


@pytest.mark.distributed
@pytest.mark.faults
def test_kills(tmp_path: Path) -> None:
    """SIGKILL at moments that are spread over the writes: `last` and `best` are always found, and whole."""
    run, draw, done = RunFolder(tmp_path / "run"), random.Random(3), 0
    (run.path / "checkpoints").mkdir(parents=True)
    for kill in range(KILLS):
        where = (str(tmp_path / f"store-{kill}"), str(run.path))
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.runs.rank_checks", str(rank), "2", *where],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(2)
        ]
        assert processes[0].stdout is not None
        done = int(processes[0].stdout.readline())
        time.sleep(draw.uniform(0.0, 0.2))
        killed = processes[kill % 2 :] if kill % 3 == 0 else processes
        for process in killed:
            process.kill()
        for process in processes:  # when one is killed, the other ends by itself
            said = process.communicate(timeout=60)[0]
            done = max(done, *map(int, said.split()), 0)
            assert process.returncode != 0
        for which in ("last", "best"):
            found = checkpoint.load(run.checkpoint(which))  # type: ignore[arg-type]
            step = found.facts["step"]
            assert step in (done, done + 1)
            assert torch.equal(found.tensors["weight"], torch.full((64, 4096), float(step)))
            assert torch.equal(found.tensors["plain"], torch.full((8,), step))
    assert done >= KILLS
