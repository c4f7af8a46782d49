"""`longspan completion`: the scripts, in the shells that this machine has."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longspan import recipes
from longspan.cli import COMMANDS, all_parsers, main
from longspan.cli.completion import Known, known
from longspan.cli.completion_scripts import bash

from .tiny import run_folder

ASK = """
source "./$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_longspan
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    run_folder(folder / "runs" / "first one")
    (folder / "texts").mkdir()
    (folder / "my text.txt").write_text("x")
    _, subparsers = all_parsers()
    (folder / "script").write_text(bash(known(subparsers)))
    return folder


def offered(place: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    line = ["bash", "-c", ASK, "bash", "script", "longspan", *words]
    done = subprocess.run(line, cwd=place, capture_output=True, text=True, check=True, timeout=30)
    assert done.stderr == ""
    return [found for found in done.stdout.split("\n") if found]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["tr"], ["train"]),
        (["da"], ["data"]),
        (["data", "in"], ["info"]),
        (["train", "quick"], ["quickstart"]),
        (["train", "--model.num-l"], ["--model.num-layers"]),
        (["train", "quickstart", "--or"], ["--or-resume"]),
        (["train", "--model.norm", ""], ["post", "pre"]),
        (["train", "--model.norm", "=", "po"], ["post"]),
        (["train", "--model.norm", "="], ["post", "pre"]),
        (["train", "--training.average-from", "x"], []),
        (["eval", "--evaluation.prot"], ["--evaluation.protocol"]),
        (["eval", "--training.prec"], []),
        (["eval", "--checkpoint", ""], ["best", "last"]),
        (["eval", "runs/fi"], ["runs/first one"]),
        (["eval", "ru"], ["runs", "runs/first one"]),
        (["inspect", "runs/first one", "my"], ["my text.txt"]),
        (["score", "r"], ["runs", "runs/first one"]),
        (["report", "my"], []),
        (["data", "info", "text"], ["text8", "texts"]),
        (["data", "info", "--order", "f"], ["frequency", "first-seen"]),
        (["generate", "--tokens", ""], []),
        (["bench", "--device", "c"], ["cpu", "cuda"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["nothing", ""], []),
    ],
)
def test_bash(place: Path, words: list[str], wanted: list[str]) -> None:
    assert sorted(offered(place, *words)) == sorted(wanted)


def test_everything_is_there(place: Path) -> None:
    assert sorted(offered(place, "")) == sorted(COMMANDS)
    assert set(recipes.names()) <= set(offered(place, "search", ""))
    for name in COMMANDS:
        options = offered(place, name, "--")
        assert "--help" in options
    assert "--json" in offered(place, "eval", "--")
    assert offered(place, "train", "", "") != offered(place, "eval", "")


def test_a_name_cannot_run_a_program(place: Path) -> None:
    script = bash(Known((), {}, (), ()))
    assert "$(touch" not in script
    _, subparsers = all_parsers()
    found = known(subparsers)
    hostile = Known(found.commands, found.dotted, ("good", "$(touch made)", '"; touch made; "'), ())
    (place / "hostile").write_text(bash(hostile))
    line = ["bash", "-c", ASK, "bash", "hostile", "longspan", "train", "g"]
    done = subprocess.run(line, cwd=place, capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.split() == ["good"]
    assert not (place / "made").exists()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "quickstart" in script
    if shell == "zsh":
        assert script.startswith("autoload -Uz bashcompinit && bashcompinit\n")
    else:
        assert "-l model.num-layers -r" in script
        assert all(line.startswith(("#", "complete -c longspan ")) for line in script.splitlines())
    if shutil.which(shell) is not None:
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=30)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from longspan.cli import main; main(['completion', 'bash']); "
        "assert not {'torch', 'numpy', 'rich'} & set(sys.modules), 'too much was imported'"
    )
    began = time.process_time()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    assert time.process_time() - began < 1.0
