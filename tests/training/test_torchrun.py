"""`torchrun -m longspan train`: one result from several processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

from longspan.cli import main
from tests.distributed.cases import torchrun

from .runs import metrics, small_table


@pytest.fixture
def recipe(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    table = small_table(text)
    table["stage"] = [{"steps": 2, "learning_rate": 0.01}]
    (tmp_path / "small.toml").write_text(tomli_w.dumps(table))
    return "small.toml"


@pytest.mark.parametrize("size", ["1", "2", "", "many"])
def test_one_process_trains(recipe: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of another launcher says nothing about this process."""
    monkeypatch.setenv("WORLD_SIZE", size)
    assert main(["train", recipe, "--out", "run"]) == 0


def test_restarted_processes_need_a_run_to_continue(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert main(["train", recipe, "--out", "run"]) == 2
    assert "give --out RUN --or-resume, or leave out --max-restarts" in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.distributed
def test_two_processes(recipe: str) -> None:
    """One summary, one result, metrics written once; then all of it is read by one process."""
    done = torchrun(["--nproc-per-node", "2", "-m", "longspan", "train", recipe, "--out", "run"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("run folder     run") == 1
    assert "longspan" not in done.stderr
    assert [line["kind"] for line in metrics(Path("run"))] == ["train", "valid", "final"]
    assert Path("run/checkpoints/best.safetensors/facts.json").is_file()
    assert main(["eval", "run"]) == 0
    assert main(["generate", "run", "--tokens", "3"]) == 0


@pytest.mark.distributed
def test_lanes_that_cannot_be_divided(recipe: str) -> None:
    words = ["-m", "longspan", "train", recipe, "--out", "run", "--training.batch_size", "5"]
    done = torchrun(["--nproc-per-node", "2", *words])
    assert done.returncode == 1
    assert "longspan: 5 lanes cannot be divided over 2 processes: choose a training.batch_size" in done.stderr
    assert not Path("run").exists()
