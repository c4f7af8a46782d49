"""Training while its terminal or the reader of its output goes away, or with standard streams closed."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from longspan.runs import RunFolder
from longspan.training import Interrupted, train
from tests import forks

from .runs import Signals, metrics, outcome, small_config, small_table

LONGSPAN = [sys.executable, "-m", "longspan"]


@pytest.fixture
def recipe(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(tomli_w.dumps(small_table(text)))
    return "small.toml"


class SendsTwo(Signals):
    """As when a terminal is closed: one from the system, one from the shell."""

    def status(self, text: str, fraction: float) -> None:
        if self.words in text:
            signal.raise_signal(self.number)
        super().status(text, fraction)


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("reporter", [Signals, SendsTwo])
def test_a_closed_terminal_saves_and_stops(text: Path, tmp_path: Path, reporter: type[Signals]) -> None:
    before = signal.getsignal(signal.SIGHUP)
    run = tmp_path / "run"
    with pytest.raises(Interrupted, match="SIGHUP") as stopped:
        train(small_config(text), run, reporter=reporter("step 12 ", signal.SIGHUP))
    assert stopped.value.exit_status == 129
    assert signal.getsignal(signal.SIGHUP) == before
    assert (run / "checkpoints" / "last.safetensors").is_file()
    assert not any(line["step"] > 12 for line in metrics(run))


def test_nohup_is_respected(text: Path, uninterrupted: Path, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        train(small_config(text), tmp_path / "run", reporter=Signals("step 12 ", signal.SIGHUP))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert outcome(tmp_path / "run") == outcome(uninterrupted)


def test_a_reader_that_goes_away(recipe: str, uninterrupted: Path) -> None:
    """`train 2>&1 | head -1`, with what comes after the training too."""
    words = [*LONGSPAN, "train", recipe, "--out", "run", "--name", "small"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert outcome(Path("run")) == outcome(uninterrupted)


@pytest.mark.parametrize(
    ("closed", "prints"),  # a table, or lines, since a table takes seconds
    [
        ("<&-", ["completion", "bash"]),
        (">&-", ["recipes"]),
        ("2>&-", ["completion", "bash"]),
        ("<&- >&- 2>&-", ["recipes"]),
    ],
)
def test_closed_streams(closed: str, prints: list[str], tmp_path: Path) -> None:
    for words, status in ((prints, 0), (["recipes", "nonsense"], 1)):
        command = f"exec {shlex.join([*LONGSPAN, *words])} {closed}"
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path, timeout=60)
        assert done.returncode == status
        assert "Traceback" not in done.stderr


def test_training_with_closed_streams(recipe: str, uninterrupted: Path) -> None:
    """No file of the run gets the number of a standard stream."""
    words = [*LONGSPAN, "train", recipe, "--out", "run", "--name", "small"]
    command = f"exec {shlex.join(words)} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], timeout=120).returncode == 0
    assert outcome(Path("run")) == outcome(uninterrupted)
    assert RunFolder(Path("run")).final() is not None
    assert "Traceback" not in Path("run/log.txt").read_text()


def test_a_full_disk_behind_stdout_is_an_error(recipe: str) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    said = Path("said.txt")
    process = forks.start(forks.longspan, "train", recipe, out=Path("/dev/full"), err=said)
    assert forks.finish(process) == 1
    assert "No space left on device" in said.read_text().splitlines()[-1]
