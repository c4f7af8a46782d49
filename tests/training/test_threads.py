"""The threads of a training: as many as asked for, and what it says when they had to wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from longspan.config import TrainingConfig
from longspan.training import threads, train
from longspan.training.threads import CoreWait, cpu_threads

from .runs import Lines, small_config


@pytest.fixture
def _three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_three_threads")
@pytest.mark.parametrize(
    ("wanted", "cores", "expected"), [("auto", 2, 2), ("auto", 8, 3), (1, 8, 1), (4, 2, 4)]
)
def test_number(monkeypatch: pytest.MonkeyPatch, wanted, cores: int, expected: int) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)
    with cpu_threads(wanted):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("_three_threads")
@pytest.mark.parametrize(
    ("cores", "processes", "by_user", "expected"),
    [(4, 2, False, 2), (8, 2, False, 3), (2, 4, False, 1), (8, 4, True, 3)],
)
def test_processes_of_torchrun_divide_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: int, by_user: bool, expected: int
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: cores)
    monkeypatch.setattr(threads, "local_size", lambda: processes)
    if not by_user:
        monkeypatch.delenv("OMP_NUM_THREADS")
    with cpu_threads("auto"):
        assert torch.get_num_threads() == expected


@pytest.mark.parametrize("number", [0, -1])
def test_there_is_at_least_one(number: int) -> None:
    with pytest.raises(ValueError, match="threads must be at least 1, or auto"):
        TrainingConfig(threads=number)


def test_a_training_uses_them(text: Path, tmp_path: Path) -> None:
    config = small_config(text, training__threads=2, stage__0__steps=2, stage__1__steps=2)
    before = torch.get_num_threads()
    run = train(config, tmp_path / "run").path
    assert json.loads((run / "environment.json").read_text())["threads"] == 2
    assert torch.get_num_threads() == before


def test_waiting_is_that_of_the_thread_that_waited_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waited(**seconds: float) -> None:
        for task, value in seconds.items():
            (tmp_path / task).mkdir(exist_ok=True)
            (tmp_path / task / "schedstat").write_text(f"123456789 {value * 1e9:.0f} 42\n")

    clock = iter([100.0, 110.0])
    monkeypatch.setattr(threads.time, "perf_counter", lambda: next(clock))
    waited(a=5.0, b=1.0)
    wait = CoreWait(tmp_path)
    waited(a=6.0, b=4.0, c=2.0)
    assert wait.share() == pytest.approx(0.3)


def test_without_these_numbers_nothing_is_said(tmp_path: Path) -> None:
    assert CoreWait(tmp_path / "missing").share() == 0.0


@pytest.mark.parametrize(
    ("share", "by_time", "said"), [(0.4, True, True), (0.4, False, False), (0.05, True, False)]
)
def test_a_stage_that_ended_by_time_says_that_it_was_slowed(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, by_time: bool, said: bool
) -> None:
    monkeypatch.setattr(CoreWait, "share", lambda self: share)
    limit = {"steps": 10**6, "max_seconds": 0.05} if by_time else {"steps": 3}
    changes = {f"stage__0__{name}": value for name, value in limit.items()} | {"stage__1__steps": 2}
    lines = Lines()
    train(small_config(text, **changes), tmp_path / "run", reporter=lines)
    found = [line for line in lines.lines if line.startswith("other work slowed this training down")]
    assert len(found) == said
    if said:
        assert "waited 40% of the time for a core" in found[0]
