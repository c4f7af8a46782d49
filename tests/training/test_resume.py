"""A run that was stopped and resumed is, bit for bit, the run that was not."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from longspan.config import RunConfig
from longspan.errors import UserError
from longspan.kernels.span_attention import cpu
from longspan.training import Interrupted, resume, train
from tests import forks

from .runs import Lines, Signals, metrics, outcome, small_config
from .victim import train_or_resume


def kill(text: Path, run: Path, moment: str, number: int) -> None:
    """Train or resume in another process until it dies at the given moment."""
    assert forks.finish(forks.start(train_or_resume, text, run, moment, number)) == -signal.SIGKILL


@pytest.mark.parametrize(
    "deaths",
    [
        [("after_an_update", 3)],  # before there is any checkpoint
        pytest.param(  # twice, in both stages
            [("after_an_update", 17), ("after_an_update", 12)], marks=pytest.mark.slow
        ),
        [("in_the_middle_of_a_line", 4)],
        [("in_the_middle_of_a_checkpoint", 3)],
        # The run folder, three checkpoints and saved.txt get their names before; data preparation renames
        # once or twice.
        [("before_a_checkpoint_gets_its_name", 7)],
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


class Dies(Lines):
    """Ends the process, as far as the run can tell, when a status line says something."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words

    def status(self, text: str, fraction: float) -> None:
        if self.words in text:
            raise MemoryError


def test_another_text_is_refused_before_there_is_a_checkpoint(text: Path, tmp_path: Path) -> None:
    mine = tmp_path / "text.txt"
    mine.write_bytes(text.read_bytes())
    with pytest.raises(MemoryError):
        train(small_config(mine), tmp_path / "run", reporter=Dies("step 5 "))
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    mine.write_bytes(text.read_bytes().replace(b"cat", b"owl"))
    with pytest.raises(UserError, match="has changed"):
        resume(tmp_path / "run")


def check_deaths_in_the_second_stage(config: RunConfig, place: Path) -> None:
    whole = train(config, place / "whole").path
    with pytest.raises(MemoryError):
        train(config, place / "run", reporter=Dies("fine step 11 "))
    with pytest.raises(MemoryError):
        resume(place / "run", reporter=Dies("fine step 13 "))
    resume(place / "run")
    assert outcome(place / "run") == outcome(whole)


@pytest.mark.parametrize("optimizer", ["adagrad", "muon", "normuon"])
def test_death_at_the_border_of_two_stages_with_one_optimizer(
    text: Path, tmp_path: Path, optimizer: str
) -> None:
    config = small_config(
        text,
        stage__0__optimizer=optimizer,
        stage__0__steps=10,  # where a checkpoint is due
        stage__1__optimizer=optimizer,
        stage__1__steps=5,
    )
    check_deaths_in_the_second_stage(config, tmp_path)


def test_stages_with_blocks_of_their_own(text: Path, tmp_path: Path) -> None:
    """The second goes on where the first ended, also after a death."""
    config = small_config(
        text, training__block_jitter=False, stage__0__steps=10, stage__1__steps=5, stage__1__block_length=40
    )
    check_deaths_in_the_second_stage(config, tmp_path)
    *_, last = (line for line in metrics(tmp_path / "run") if line["kind"] == "train")
    assert last["tokens"] == 6 * (10 * 24 + 5 * 40)


def test_another_machine_is_mentioned(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(small_config(text), run, reporter=Signals("step 5 ", signal.SIGINT))
    written = run / "environment.json"
    facts = json.loads(written.read_text())
    with pytest.raises(MemoryError):
        resume(run, reporter=(same := Dies("step 6 ")))
    assert not any("last bits" in line for line in same.lines)
    written.write_text(json.dumps(facts | {"torch": "2.0.0", "threads": 64, "device": "NVIDIA H100"}))
    with pytest.raises(MemoryError):
        resume(run, reporter=(other := Dies("step 6 ")))
    expected = (
        f"torch 2.0.0 -> {torch.__version__}, device NVIDIA H100 -> cpu, "
        f"threads 64 -> {torch.get_num_threads()}: results may differ in their last bits"
    )
    assert expected in other.lines


def test_attention_that_is_no_longer_compiled_is_mentioned(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "can_compile", lambda: True)
    run = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(small_config(text), run, reporter=Signals("step 5 ", signal.SIGINT))
    monkeypatch.setattr(cpu, "can_compile", lambda: False)
    with pytest.raises(MemoryError):
        resume(run, reporter=(other := Dies("step 6 ")))
    assert "attention compiled -> plain torch: results may differ in their last bits" in other.lines


class Rival(Lines):
    """Tries to train the run that is being trained, again and again."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.run = run

    def status(self, text: str, fraction: float) -> None:
        with pytest.raises(UserError, match="run is being trained by another process") as refused:
            resume(self.run)
        self.say(str(refused.value))


def test_one_process_at_a_time(text: Path, uninterrupted: Path, tmp_path: Path) -> None:
    rival = Rival(tmp_path / "run")
    with pytest.raises(MemoryError):
        train(small_config(text), rival.run, reporter=Dies("step 5 "))
    resume(rival.run, reporter=rival)  # what the dead one held is free
    assert f"{rival.run} is being trained by another process: wait for it, or stop it" in rival.lines
    assert outcome(rival.run) == outcome(uninterrupted)
