"""Several processes of torchrun: one clear line in each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

import longspan
from longspan.cli import main
from longspan.errors import UserError

from .runs import small_table

LINE = "Longspan runs on one device, but WORLD_SIZE is 2: start it without torchrun"


@pytest.fixture
def recipe(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    table = small_table(text)
    table["stage"] = [{"steps": 2, "learning_rate": 0.01}]
    (tmp_path / "small.toml").write_text(tomli_w.dumps(table))
    return "small.toml"


@pytest.mark.parametrize(
    "command",
    [
        ["train", "small.toml"],
        ["train", "--resume", "RUN"],
        ["search"],
        ["search", "--resume", "RUN"],
    ],
    ids=" ".join,
)
def test_a_second_process_is_one_line(
    recipe: str,
    command: list[str],
    uninterrupted: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([word.replace("RUN", str(uninterrupted)) for word in command]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"longspan: {LINE}")
    assert not Path("runs").exists()


def test_from_python(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=LINE):
        longspan.train(recipe)


@pytest.mark.parametrize("size", ["1", "", "many"])
def test_one_process_trains(recipe: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    assert main(["train", recipe, "--out", "run"]) == 0


@pytest.mark.parametrize("processes", [1, 2])
def test_torchrun(recipe: str, processes: int) -> None:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    words = ["-m", "longspan", "train", recipe, "--out", "run"]
    done = subprocess.run([*launch, *words], capture_output=True, text=True, timeout=120)
    if processes == 1:
        assert done.returncode == 0, done.stderr
        assert Path("run/checkpoints/best.safetensors").is_file()
    else:
        assert done.returncode != 0
        # torchrun may end the second process as soon as the first has failed.
        said = [line for line in done.stderr.splitlines() if line.startswith("longspan: ") and LINE in line]
        assert 1 <= len(said) <= 2
        assert "longspan/cli" not in done.stderr  # no traceback of ours; torchrun has its own
        assert not Path("run").exists()
