"""Commands in the processes of torchrun: which run there, and what each process prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longspan.cli import COMMANDS, main, ranks


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that processes wait before they print."""
    waited: list[float] = []
    monkeypatch.setattr(ranks.time, "sleep", waited.append)
    return waited


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int = 2) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")


@pytest.mark.parametrize(
    "words",
    ["generate run", "recipes", "runs", "data list", "bench training", "spans run"],
)
def test_commands_of_one_process(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_rank(monkeypatch, 0)
    assert main(words.split()) == 2
    command = words.split()[0]
    line = f"longspan: longspan {command} runs in one process: start it without torchrun\n"
    assert capsys.readouterr() == ("", line)


def test_commands_that_are_divided_exist() -> None:
    assert set(ranks.DIVIDED) < set(COMMANDS)


@pytest.mark.parametrize("size", ["1", ""])
def test_one_process(size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if size:
        as_rank(monkeypatch, 0, int(size))
    else:
        monkeypatch.setenv("WORLD_SIZE", "8")  # a batch system may set it without the others
    assert main(["recipes"]) == 0
    assert "enwik8" in capsys.readouterr().out


@pytest.mark.parametrize(("rank", "named", "seconds"), [(0, "", []), (3, "rank 3: ", [2.0])])
def test_rank_0_prints_an_error_first(
    rank: int,
    named: str,
    seconds: list[float],
    waited: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    as_rank(monkeypatch, rank, 4)
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    assert main(["eval"]) == 2
    said = f"{named}the following arguments are required: RUN (see 'longspan eval --help')"
    assert capsys.readouterr().err == f"longspan: {said}\n"
    assert waited == seconds
    shown = json.loads(report.read_text())["message"]["extraInfo"]["py_callstack"]
    assert shown.splitlines()[-1] == f"longspan.errors.UsageError: {said}".replace("Usage", "User")


def test_the_report_shows_where_a_fault_of_the_program_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(words: list[str]) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("longspan.cli._run", fail)
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    with pytest.raises(ZeroDivisionError):
        main(["recipes"])
    shown = json.loads(report.read_text())["message"]["extraInfo"]["py_callstack"]
    assert "in fail" in shown
    assert shown.endswith("ZeroDivisionError: a fault\n")


@pytest.mark.parametrize("rank", [0, 1])
def test_warnings_are_those_of_rank_0(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import warnings

    def warn(words: list[str]) -> None:
        warnings.warn("careful", stacklevel=1)

    as_rank(monkeypatch, rank)
    monkeypatch.setattr("longspan.cli._run", warn)
    assert main(["recipes"]) == 0
    assert capsys.readouterr().err.count("longspan: warning: careful") == (rank == 0)
