"""Every command and every line of Python in the README works, in the order a reader would run them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

# What makes a training command short; everything else about it stays as the README has it.
SHORT = [
    "--stage.0.max-seconds",
    "2",
    "--stage.0.steps",
    "6",
    "--training.batch-size",
    "2",
    "--evaluation.max-tokens",
    "500",
    "--evaluation.max-tokens-final",
    "500",
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("bash") for line in block.splitlines() if line.strip()]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where somebody follows the README: a home of its own and a text to train on."""
    (tmp_path / "my.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONGSPAN_HOME", str(tmp_path / "home"))
    return tmp_path


def test_the_readme_has_the_commands_this_file_knows():
    kinds = {tuple(shlex.split(command)[:2]) for command in commands()}
    assert {("make", "train"), ("make", "test"), ("pip", "install"), ("longspan", "train")} <= kinds
    assert {kind[0] for kind in kinds} == {"make", "pip", "longspan"}


def test_make_train_and_make_test_do_what_is_written():
    for target, expected in (("train", "bin/longspan train"), ("test", "-m pytest")):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
        assert expected in done.stdout


def test_pip_install(tmp_path):
    """The package builds from a copy of its files, and what is installed knows its recipes."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "*.egg-info", "build", "tests"))
    target = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), "."]
    subprocess.run(install, cwd=copy, check=True, timeout=240)
    show = [sys.executable, "-c", "import longspan.recipes as r; print(r.__file__); print(r.names())"]
    done = subprocess.run(
        show, cwd=tmp_path, env={"PYTHONPATH": str(target)}, capture_output=True, text=True, check=True
    )
    assert str(target) in done.stdout
    assert "quickstart" in done.stdout


def test_every_longspan_command_in_order_and_then_the_python(reader, capsys):
    """In this process: each process would import torch anew."""
    for command in commands():
        program, *words = shlex.split(command)
        if program != "longspan":
            continue
        if words[0] == "train" and "--resume" not in words:
            words += SHORT
        if words[0] == "eval":
            words += ["--max-tokens", "500"]
        if words[0] == "attention":
            words += ["--tokens", "300"]
        if words[0] == "generate":
            words += ["--tokens", "5"]
        status = main(words)
        out, err = capsys.readouterr()
        assert status == 0, f"{command}\n{out}\n{err}"
        assert out.strip(), command
    assert (reader / "runs" / "quickstart" / "spans.png").is_file()
    assert (reader / "attention.png").is_file()
    assert (reader / "runs" / "tuned" / "init.json").is_file()
    assert (reader / "runs" / "mine" / "checkpoints" / "last.safetensors").is_file()

    (program,) = blocks("python")
    assert "longspan.load" in program
    exec(compile(program.replace("tokens=200", "tokens=5"), "README.md", "exec"), {"__name__": "__main__"})
