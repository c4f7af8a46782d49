"""`longspan runs`: which folders are runs, how far they are, and their score."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from longspan.cli import main
from tests.using.test_cli import complaint
from tests.using.tiny import run_folder


def test_runs_are_listed_with_step_and_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_folder(tmp_path / "b" / "finished")
    killed = run_folder(tmp_path / "a" / "killed")
    fresh = run_folder(tmp_path / "fresh")
    (tmp_path / "b" / "notes").mkdir()
    valid = [{"kind": "valid", "step": 5, "bits_per_byte": 3.0, "best": True}]
    valid += [{"kind": "valid", "step": 9, "bits_per_byte": 3.5, "best": False}]
    text = "".join(json.dumps(line) + "\n" for line in valid)
    killed.metrics.write_text(text + '{"kind": "tra')
    final = {"kind": "final", "step": 5, "valid": {"bits_per_byte": 2.5}, "test": {"bits_per_byte": 2.25}}
    finished.metrics.write_text(text + json.dumps(final) + "\n")
    (fresh.path / "config.toml").write_text("not = [toml")

    assert main(["runs", str(tmp_path), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(line["run"]).name for line in found] == ["killed", "finished", "fresh"]
    one, two, three = found
    assert (one["step"], one["finished"], one["split"], one["score"]) == (9, False, "valid", 3.0)
    assert (two["step"], two["finished"], two["split"], two["score"]) == (9, True, "test", 2.25)
    assert (two["name"], two["architecture"], two["corpus"]) == ("tiny", "adaptive-span", "python")
    assert (three["name"], three["step"], three["score"]) == (None, 0, None)

    assert main(["runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "9, finished" in shown
    assert "2.2500 bits/byte (test)" in shown
    assert "3.0000 bits/byte (valid)" in shown


def test_folders_without_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "there is no folder runs" in complaint(capsys, "runs")
    (tmp_path / "runs").mkdir()
    assert "runs has no runs" in complaint(capsys, "runs")
    assert main(["runs", "--json"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("config", "metrics"),
    [
        ("stage = [1, 2]", ""),
        ("stage = 3", ""),
        ("[stage]\nsteps = 3", ""),
        ('[[stage]]\nsteps = "many"', ""),
        ("model = 3\ndata = []", ""),
        ("", "[" * 100_000),
        ("", '{"kind": "final", "test": 3, "step": "x"}'),
        ("", '{"kind": "final", "test": {"bits_per_byte": "low"}}'),
        ("", '{"kind": "valid", "best": true, "bits_per_byte": null}'),
        ("", None),  # a pipe, which nobody writes to
    ],
)
def test_odd_files_are_no_traceback(
    config: str, metrics: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path / "run")
    (run.path / "config.toml").write_text(config)
    if metrics is None:
        run.metrics.unlink(missing_ok=True)
        os.mkfifo(run.metrics)
    else:
        run.metrics.write_text(metrics)
    for words in (["runs", str(tmp_path)], ["runs", str(tmp_path), "--json"]):
        assert main(words) == 0
        assert str(run.path.name) in capsys.readouterr().out
