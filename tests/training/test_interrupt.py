"""Signals that arrive twice."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from longspan.training import train
from longspan.training.errors import Interrupted, Stopped
from longspan.training.interrupt import Interrupt
from tests.training.runs import Lines, Signals, small_config, write_text


class Ended(Exception):
    pass


class Said(Signals, Lines):
    """Keeps what a run says; SIGINT after step 5."""

    def __init__(self) -> None:
        Signals.__init__(self, "step 5 ", signal.SIGINT)
        Lines.__init__(self)


@pytest.fixture(autouse=True)
def ends_the_process() -> Iterator[None]:
    """A SIGTERM outside of `Interrupt` is an exception here."""

    def end(number: int, frame: object) -> None:
        raise Ended

    previous = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, previous)


def test_a_second_sigterm_ends_the_process() -> None:
    with Interrupt():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Ended):
            signal.raise_signal(signal.SIGTERM)


def test_a_run_says_that_it_saves(tmp_path: Path) -> None:
    said = Said()
    with pytest.raises(Interrupted):
        train(small_config(write_text(tmp_path)), tmp_path / "run", reporter=said)
    assert said.lines[-1] == "saving a checkpoint; a second SIGINT or SIGTERM would stop without it"


def test_a_run_that_its_callback_stops_promises_nothing(tmp_path: Path) -> None:
    said = Lines()
    with pytest.raises(Stopped):
        train(
            small_config(write_text(tmp_path)),
            tmp_path / "run",
            reporter=said,
            callback=lambda line: False,
        )
    assert said.lines[-1] == "saving a checkpoint"


def test_under_torchrun_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm signals all processes of a job, and torchrun signals its own again."""
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
    }.items():
        monkeypatch.setenv(name, value)
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted, match="SIGTERM"):
            interrupt.check()
    with pytest.raises(Ended):  # the handler from before is back
        signal.raise_signal(signal.SIGTERM)
