"""Progress: a bar on a terminal, plain lines elsewhere, never among the results."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longspan import progress
from longspan.bench import machine
from longspan.cli import main
from longspan.progress import Task, duration, every_seconds, say, showing, task, tell, told
from longspan.training.reporter import LiveReporter, reporter_for

from .using.tiny import run_folder

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LINE = re.compile(r"scoring \S+: \d+%, [\d,]+ of 30,000 bytes, [\d,.e+]+ bytes/s(, \d+:\d\d left)?")
SMALL = [f"--model.{name}" for name in ("num-layers=1", "width=16", "num-heads=2", "inner-width=16")]


class Screen:
    """A pseudo-terminal in place of standard error; `text()` ends it and returns what it was sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reader, slave = os.openpty()
        self._parts: list[bytes] = []
        self._stream = os.fdopen(slave, "w")
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        monkeypatch.setattr(sys, "stderr", self._stream)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setattr(progress, "BAR_SECONDS", 0.0)

    def _read(self) -> None:
        try:
            while part := os.read(self._reader, 1 << 16):
                self._parts.append(part)
        except OSError:  # closed on the other side
            pass

    def text(self) -> str:
        self._stream.close()
        self._thread.join(5)
        return b"".join(self._parts).decode()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("progress")
    run_folder(folder / "runs" / "run")
    (folder / "text.txt").write_text("def f(x):\n    return x\n" * 40)
    (folder / "long.txt").write_bytes(b"0123456789" * 3000)
    (folder / "counts.txt").write_text("5\n3\n2\n1\n")
    return folder


@pytest.fixture(autouse=True)
def _there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("LONGSPAN_HOME", str(place / "home"))


def test_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 102.0)
    assert Task("scoring", "tokens", 2000, 500, began=100.0).words() == (
        "scoring: 25%, 500 of 2,000 tokens, 250 tokens/s, 0:06 left"
    )
    assert Task("reading", "runs", done=3, began=100.0).words() == "reading: 3 runs, 1.5 runs/s, 0:02"
    assert Task("reading", "runs", 8, began=100.0).words() == "reading: 0%, 0 of 8 runs, 0 runs/s"
    assert Task("drawing", began=0.0).words() == "drawing, 1:42"
    assert duration(3661) == "1:01:01"


def test_a_program_is_silent_unless_it_asks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0.01)
    lines: list[str] = []
    with told(lines.append, "reading", "bytes", 8) as telling:
        telling(4)
        wait_for(lambda: len(lines) > 1)
    with task("silent"):
        time.sleep(0.05)
    tell("silent")
    assert all(line.startswith("reading: 50%, 4 of 8 bytes") for line in lines)
    assert capsys.readouterr() == ("", "")
    with showing(quiet=True):
        tell("silent")
        say("a note")
    assert capsys.readouterr() == ("", "a note\n")


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_file_gets_plain_lines_and_not_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0.05)
    stream = io.StringIO()
    with showing(stream), task("reading", "tokens", 10**6) as telling:
        began = time.monotonic()
        for done in range(200_000):
            telling(done)
        wait_for(lambda: stream.getvalue().count("\n") > 1)
        seconds = time.monotonic() - began
    lines = stream.getvalue().splitlines()
    assert 2 <= len(lines) <= seconds / 0.05 + 1
    assert all(re.fullmatch(r"reading: \d+%, [\d,]+ of 1,000,000 tokens, .*", line) for line in lines)


def test_a_command_on_a_pipe(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0.01)
    assert main(["score", "runs/run", "long.txt"]) == 0
    out, err = capfd.readouterr()
    assert re.fullmatch(r"long\.txt\t30000\t30000\t\d+\.\d{4}\n", out)
    assert err
    assert all(LINE.fullmatch(line) for line in err.splitlines())
    assert main(["score", "runs/run", "long.txt", "--quiet"]) == 0
    assert capfd.readouterr() == (out, "")


COMMANDS = {
    "eval": ["eval", "runs/run", "--data", "text.txt"],
    "generate": ["generate", "runs/run", "--tokens", "30", "--seed", "1", "--json"],
    "generate text": ["generate", "runs/run", "--tokens", "30", "--seed", "1", "--prompt", "def"],
    "spans": ["spans", "runs/run", "--text", "text.txt"],
    "attention": ["attention", "runs/run", "text.txt", "--json"],
    "inspect": ["inspect", "runs/run", "text.txt", "--json"],
    "score": ["score", "runs/run", "text.txt"],
    "report": ["report", "runs/run"],
    "data info": ["data", "info", "text.txt"],
    "data add": ["data", "add", "mine", "text.txt"],
    "cutoffs": ["cutoffs", "--counts", "counts.txt", "--clusters", "2"],
    "runs": ["runs"],
    "recipes": ["recipes", "quickstart", "--json"],
}
SHOWN = {
    "eval": "scoring: ",
    "generate": "generating: ",
    "generate text": "generating: ",
    "spans": "tokens/s",
    "attention": "reading: ",
    "inspect": "inspecting text.txt: ",
    "score": "scoring text.txt: ",
    "report": "runs/s",
    "data info": "counting the tokens of test",
    "data add": "checking text.txt",
    "cutoffs": "comparing clusters",
    "runs": "reading: ",
    "recipes": "building models: ",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_a_bar_on_a_terminal(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*COMMANDS[name], "--quiet"]) == 0
    alone = capfd.readouterr()
    assert alone.err == ""
    if name == "data add":
        assert main(["data", "remove", "mine"]) == 0
        capfd.readouterr()
    screen = Screen(monkeypatch)
    assert main(COMMANDS[name]) == 0
    shown = screen.text()
    assert SHOWN[name] in CODES.sub("", shown)
    assert "━" in shown
    assert shown.endswith("\x1b[?25h") or "\x1b[2K" in shown[-40:]  # it is removed at the end
    assert capfd.readouterr().out == alone.out  # results are results


def test_bench(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "bench",
        "adaptive-span-small",
        *SMALL,
        "--steps",
        "1",
        "--batch-size",
        "1",
        "--block-length",
        "8",
    ]
    screen = Screen(monkeypatch)
    monkeypatch.setitem(machine._SIDE, "cpu", 32)
    assert main([*words, "--json"]) == 0
    shown = CODES.sub("", screen.text())
    assert "adaptive-span-small, " in shown
    assert "steps/s" in shown
    figures = json.loads(capfd.readouterr().out)["figures"]
    assert figures[0]["recipe"] == "adaptive-span-small"


def test_json_is_printed_or_written(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["attention", "runs/run", "text.txt"]
    assert main([*words, "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert main([*words, "--json", str(tmp_path / "new.json")]) == 0
    assert "mean distance" in capfd.readouterr().out
    assert json.loads((tmp_path / "new.json").read_text()) == printed
    assert main(["cutoffs", "--counts", "counts.txt", "--clusters", "2", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert sum(cluster["words"] for cluster in found["clusters"]) == 4
    assert [cluster["start"] for cluster in found["clusters"]] == [0, *found["cutoffs"]]
    assert found["cost"] < found["cost_of_plain_softmax"] == 4


def test_lines_stay_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch)
    with showing(), task("outer", "parts", 2) as telling:
        time.sleep(0.05)
        say("a note \x1b[31m")
        with task("inner"):
            telling(1)
            time.sleep(0.15)
    plain = CODES.sub("", screen.text())
    assert "a note \\x1b[31m\r\n" in plain
    assert "outer: 50%, 1 of 2 parts" in plain
    assert "inner, 0:00" in plain


def test_a_short_task_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch)
    monkeypatch.setattr(progress, "BAR_SECONDS", 5.0)
    with showing(), task("short"):
        pass
    assert screen.text() == ""


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0.01)
    with showing(), task("reading"):
        time.sleep(0.1)
    text = screen.text()
    assert text.startswith("reading, 0:00\r\n")
    assert "\x1b" not in text


def test_training_into_a_file_shows_its_status_on_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(monkeypatch)
    with reporter_for(sys.stdout) as reporter:
        assert isinstance(reporter, LiveReporter)
        reporter.status("step 3  loss 2.0", 0.5)
        reporter.log("step 3  loss 2.0  lr 1")
        reporter.score("held-out 1")
        reporter.say("done")
    assert "step 3  loss 2.0" in CODES.sub("", screen.text())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ", 1)[-1] for line in lines] == ["step 3  loss 2.0  lr 1", "held-out 1", "done"]


def test_every_seconds_ends_with_the_block() -> None:
    lines: list[float] = []
    with every_seconds(0.01, lines.append):
        wait_for(lambda: bool(lines))
    count = len(lines)
    time.sleep(0.03)
    assert len(lines) == count
