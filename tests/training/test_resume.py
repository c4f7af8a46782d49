"""A run that was stopped and resumed is, bit for bit, the run that was not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.errors import UserError
from longspan.training import Interrupted, Reporter, resume, train

from .runs import metrics, outcome, small_config

ROOT = Path(__file__).parents[2]


def kill(text: Path, run: Path, moment: str, number: int) -> None:
    """Train or resume in another process until it dies at the given moment."""
    words = [sys.executable, "-m", "tests.training.victim", text, run, moment, number]
    done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    "deaths",
    [
        [("after_an_update", 3)],  # before there is any checkpoint
        [("after_an_update", 17), ("after_an_update", 12)],  # twice, in both stages
        [("in_the_middle_of_a_line", 4)],
        [("in_the_middle_of_a_checkpoint", 3)],
        # The run folder and three checkpoints get their names before; data preparation renames once or twice.
        [("before_a_checkpoint_gets_its_name", 6)],
        [("in_an_evaluation", 5)],  # the final one, on the test split
    ],
    ids=lambda deaths: "+".join(f"{moment}-{number}" for moment, number in deaths),
)
def test_sigkill(text: Path, uninterrupted: Path, tmp_path: Path, deaths: list[tuple[str, int]]) -> None:
    run = tmp_path / "run"
    for moment, number in deaths:
        kill(text, run, moment, number)
    resume(run)
    assert outcome(run) == outcome(uninterrupted)


class Signals(Reporter):
    """Sends this process a signal when a status line says something."""

    def __init__(self, words: str, number: int) -> None:
        self.words, self.number = words, number

    def status(self, text: str, fraction: float) -> None:
        if self.words in text:
            self.words = "never again"
            signal.raise_signal(self.number)


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("train step 1 ", signal.SIGINT),
        ("train step 12 ", signal.SIGTERM),
        ("train step 25 ", signal.SIGINT),  # the last of its stage
        ("fine step 31 ", signal.SIGINT),
        ("fine step 43 ", signal.SIGTERM),  # the last of all
        ("scoring valid", signal.SIGTERM),
        ("scoring test", signal.SIGINT),
    ],
)
def test_a_signal_saves_and_stops(
    text: Path, uninterrupted: Path, tmp_path: Path, words: str, number: int
) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as stopped:
        train(small_config(text), tmp_path / "run", reporter=Signals(words, number))
    assert stopped.value.exit_status == 128 + number
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert metrics(tmp_path / "run") != metrics(uninterrupted)
    resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(uninterrupted)


class Lines(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_a_finished_run_stays_as_it_is(uninterrupted: Path) -> None:
    before = {path: path.read_bytes() for path in uninterrupted.rglob("*") if path.is_file()}
    said = Lines()
    resume(uninterrupted, reporter=said)
    assert said.lines == [f"{uninterrupted} is finished: nothing to do"]
    assert {path: path.read_bytes() for path in uninterrupted.rglob("*") if path.is_file()} == before


def test_another_text_is_refused(text: Path, tmp_path: Path) -> None:
    mine = tmp_path / "text.txt"
    mine.write_bytes(text.read_bytes())
    with pytest.raises(Interrupted):
        train(small_config(mine), tmp_path / "run", reporter=Signals("step 5 ", signal.SIGINT))
    mine.write_bytes(text.read_bytes().replace(b"cat", b"owl"))
    with pytest.raises(UserError, match="has changed"):
        resume(tmp_path / "run")


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_checkpoint_is_named_and_nothing_is_lost(text: Path, tmp_path: Path, damage: str) -> None:
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(small_config(text), run, reporter=Signals("step 20 ", signal.SIGINT))
    last = run / "checkpoints" / "last.safetensors"
    content = bytearray(last.read_bytes())
    if damage == "truncated":
        del content[-10:]
    else:
        content[-10] ^= 1
    last.write_bytes(content)
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"last\.safetensors is .*damaged; copy best\.safetensors over it"):
        resume(run)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_the_advice_to_copy_best_over_a_damaged_last_is_sound(
    text: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(small_config(text), run, reporter=Signals("step 28 ", signal.SIGINT))
    checkpoints = run / "checkpoints"
    (checkpoints / "last.safetensors").write_bytes((checkpoints / "best.safetensors").read_bytes())
    resume(run)
    assert outcome(run) == outcome(uninterrupted)
