"""Some mistakes as real processes: what a shell sees. And an environment that does not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.cli import main
from tests.abuse.mistake import Mistake, failure, usage
from tests.abuse.test_abuse import check, snapshot

pytestmark = pytest.mark.timeout(60)

PROCESSES = [
    usage("train --nothing", "unknown option '--nothing'"),
    failure("recipes deep-list.toml", "deep-list.toml is not valid TOML: it is nested too deeply"),
    failure("generate damaged/weights-cut", "best.safetensors"),
    failure("import checkpoints/code.pt --kind sha-rnn --out new", "code.pt"),
    failure("data info nowhere.txt", "no file or folder nowhere.txt"),
]


@pytest.mark.parametrize("mistake", PROCESSES, ids=lambda mistake: mistake.name)
def test_a_process_says_one_line_and_ends_with_the_status(mistake: Mistake, folder: Path) -> None:
    before = dict(snapshot(folder))
    command = [sys.executable, "-m", "longspan", *mistake.words]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=50)
    assert ended.stdout == ""
    assert dict(snapshot(folder)) == before
    check(mistake, ended.returncode, ended.stderr)


@pytest.mark.parametrize("words", ["train tiny.toml --out new", "data info text.txt"])
@pytest.mark.parametrize("limit", [24_000, 120_000, 400_000])  # KiB
def test_a_small_limit_of_the_address_space(words: str, limit: int, folder: Path) -> None:
    """Python starts, its libraries do not fit. Without a check torch and OpenBLAS abort in some of them."""
    before = dict(snapshot(folder))
    limited = f"ulimit -c 0 -v {limit} && exec {sys.executable} -m longspan {words}"
    ended = subprocess.run(["bash", "-c", limited], capture_output=True, text=True, timeout=50)
    assert dict(snapshot(folder)) == before
    check(failure(words, "not enough memory.*ulimit -v"), ended.returncode, ended.stderr)


@pytest.mark.parametrize("words", [("data", "info", "text.txt"), ("train", "tiny.toml", "--out", "new")])
@pytest.mark.parametrize("home", ["text.txt", "text.txt/below", "n" * 300])
def test_a_home_that_is_no_folder(
    words: tuple[str, ...],
    home: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = dict(snapshot(folder))
    monkeypatch.setenv("LONGSPAN_HOME", home)
    status = main(words)
    check(failure(words, home[:20]), status, capfd.readouterr().err)
    assert dict(snapshot(folder)) == before


@pytest.mark.parametrize("content", ["", "[", "[1]", '{"mine": 3}', "[" * 100_000, "\x00"])
def test_a_damaged_list_of_corpora(
    content: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "corpora.json").write_text(content)
    monkeypatch.setenv("LONGSPAN_HOME", str(tmp_path))
    status = main(["data", "info", "mine"])
    check(failure("", r"corpora\.json is damaged"), status, capfd.readouterr().err)
    assert os.listdir(tmp_path) == ["corpora.json"]
