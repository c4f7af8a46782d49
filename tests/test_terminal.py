"""On a terminal control characters are shown, not sent; elsewhere output is unchanged."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from longspan import terminal
from longspan.cli import main
from longspan.cli.console import say, show_table
from longspan.terminal import control_characters_shown, visible
from longspan.training.reporter import LiveReporter, reporter_for_stdout

from .using.tiny import run_folder

SOURCES = Path(terminal.__file__).parent
OF_RICH = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")  # colours and cursor movements
UNWANTED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Terminal(io.TextIOWrapper):
    """A text stream that says it is a terminal."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="\n")

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode()


def terminal_for(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard output and standard error; called in a test, since pytest sets both when a test begins."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    return screen


def test_what_is_shown() -> None:
    assert (
        visible("a\x1b]0;title\x07b\x9bc\x7f\r\n\td é\x00")
        == r"a\x1b]0;title\x07b\x9bc\x7f\x0d" + "\n\td é" + r"\x00"
    )


def generate(run: Path) -> None:
    words = [
        "generate",
        str(run),
        "--prompt",
        "say \x1b[31m",
        "--tokens",
        "400",
        "--temperature",
        "1",
        "--seed",
        "1",
    ]
    assert main(words) == 0


def test_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "run").path
    elsewhere = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="\n")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", elsewhere)
        generate(run)
    elsewhere.flush()
    raw = elsewhere.buffer.getvalue().decode()
    assert raw.startswith("say \x1b[31m")
    assert len(UNWANTED.findall(raw)) > 10  # the weights are random, and so are the bytes

    screen = terminal_for(monkeypatch)
    generate(run)
    assert screen.text() == visible(raw)
    assert sys.stdout is screen


def test_errors_and_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal_for(monkeypatch)
    assert main(["generate", "no \x1bsuch run"]) != 0
    assert screen.text() == "longspan: there is no run folder no \\x1bsuch run\n"
    with control_characters_shown():
        say("downloading \x07")
    assert screen.text().endswith("downloading \\x07\n")


def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal_for(monkeypatch)
    with control_characters_shown():
        show_table(("name",), [("a \x1b]0;title\x07 b",)])
    plain = OF_RICH.sub("", screen.text())
    assert r"a \x1b]0;title\x07 b" in plain
    assert not UNWANTED.search(plain)


def test_the_report_of_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal_for(monkeypatch)
    with control_characters_shown(), reporter_for_stdout() as reporter:
        assert isinstance(reporter, LiveReporter)
        reporter.status("stage \x1b]0;title\x07", 0.5)
        reporter.say("run \x1b]0;title\x07")
    text = screen.text()
    assert "\x1b[" in text  # the status line is drawn with rich's own codes
    plain = OF_RICH.sub("", text)
    assert r"run \x1b]0;title\x07" in plain
    assert not UNWANTED.search(plain)


def test_consoles_are_made_in_one_place() -> None:
    """A console made elsewhere would write its own codes to a stream that shows them."""
    made = [path.name for path in SOURCES.rglob("*.py") if re.search(r"\bConsole\(", path.read_text())]
    assert made == ["terminal.py"]
