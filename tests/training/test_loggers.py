"""`log.txt` of a run folder, and metrics for Weights & Biases."""

from __future__ import annotations

import re
import signal
import sys
from types import ModuleType
from typing import Any

import pytest

from longspan.errors import UserError
from longspan.training import Interrupted, resume, train

from .runs import Lines, Signals, metrics, small_config

STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ")
SHORT = {"stage__0__steps": 20, "stage__1__steps": 2, "training__evaluate_every": 0}


class Shown(Lines):
    """Everything a plain terminal shows."""

    def log(self, line: str) -> None:
        self.say(line)


def test_the_log_has_what_the_terminal_says(text, tmp_path):
    shown = Shown()
    run = train(small_config(text, **SHORT), tmp_path / "run", reporter=shown).path
    lines = [STAMP.sub("", line) for line in (run / "log.txt").read_text().splitlines()]
    summary = next(line for line in shown.lines if "parameters" in line)
    assert [line for line in lines if line in shown.lines] == shown.lines
    assert any(line.startswith("step 7 of 22  loss ") for line in lines)
    assert "AdaptiveSpan" in lines[lines.index(summary) + 1] or "Stack" in lines[lines.index(summary) + 1]
    assert lines[-1].startswith('finished: {"kind": "final"')


def test_a_resumed_run_appends_and_keeps_every_line(text, tmp_path):
    config = small_config(text, **SHORT)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", reporter=Signals("step 12 ", signal.SIGTERM))
    log = tmp_path / "run" / "log.txt"
    before = log.read_text()
    assert before.splitlines()[-1].startswith("stopped: ")
    checkpoints = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").iterdir()}
    for path, content in checkpoints.items():
        path.write_bytes(content[:100])
    with pytest.raises(UserError):
        resume(tmp_path / "run")
    assert log.read_text() == before
    for path, content in checkpoints.items():
        path.write_bytes(content)
    resume(tmp_path / "run")
    after = log.read_text()
    assert after.startswith(before)
    added = after.removeprefix(before).splitlines()
    assert added[0].startswith("continuing ")
    assert any(re.match(STAMP.pattern + "step 14 of 22 ", line) for line in added)
    finished = log.read_text()
    resume(tmp_path / "run")
    assert log.read_text() == finished


class FakeWandb(ModuleType):
    """Stores what it is given."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[dict[str, Any]] = []
        self.finished = 0

    def init(self, **settings: Any) -> FakeWandb:
        self.begun.append(settings)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished += 1


def test_wandb_gets_every_line_and_a_resumed_run_keeps_its_id(text, tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    config = small_config(text, training__logger="wandb", **SHORT)
    with pytest.raises(Interrupted):
        train(config, tmp_path / "run", reporter=Signals("step 12 ", signal.SIGTERM))
    resume(tmp_path / "run")
    first, second = fake.begun
    assert first["id"] == second["id"] == (tmp_path / "run" / "wandb_id.txt").read_text().strip()
    assert (first["project"], first["name"], first["resume"]) == ("longspan", "small", "allow")
    assert first["config"]["model"]["width"] == 16
    assert fake.finished == 2
    lines = metrics(tmp_path / "run")
    assert [sent["step"] for sent in fake.logged] == [line["step"] for line in lines]
    for sent, line in zip(fake.logged, lines, strict=True):
        loss = line["valid"]["loss"] if line["kind"] == "final" else line["loss"]
        name = "final/valid/loss" if line["kind"] == "final" else f"{line['kind']}/loss"
        assert sent[name] == loss


def test_two_runs_have_two_ids(text, tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tiny = {"stage__0__steps": 1, "stage__1__steps": 1, "training__logger": "wandb"}
    for name in ("one", "two"):
        train(small_config(text, **tiny), tmp_path / name)
    assert len({settings["id"] for settings in fake.begun}) == 2


def test_without_wandb_there_is_one_line_and_no_folder(text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"not installed: pip install 'longspan\[wandb\]'"):
        train(small_config(text, training__logger="wandb"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_start_that_fails_is_one_line(text, tmp_path, monkeypatch):
    fake = FakeWandb()

    def refuse(**_: Any) -> None:
        raise RuntimeError("api_key not configured\nmore")

    fake.init = refuse
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(UserError, match="does not start: api_key not configured; run 'wandb login'"):
        train(small_config(text, training__logger="wandb"), tmp_path / "run")
