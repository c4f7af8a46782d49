"""A training never writes through a link: a run folder may come from elsewhere."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.errors import UserError
from longspan.runs.no_links import open_to_append
from longspan.training import resume
from longspan.training.journal import Journal

from .runs import outcome


@pytest.fixture
def unfinished(uninterrupted: Path, tmp_path: Path) -> Path:
    """A run that can be resumed: its last line is missing."""
    run = tmp_path / "run"
    shutil.copytree(uninterrupted, run)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:-1]))
    return run


def replace_by_link(path: Path, target: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize("name", ["metrics.jsonl", "spans.jsonl", "new.jsonl"])
def test_a_file_is_not_written_through_a_link(unfinished: Path, tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    precious.write_text("not a line of this run\n" * 99)
    (unfinished / name).touch()
    replace_by_link(unfinished / name, precious)
    with pytest.raises(UserError, match=rf"run/{name} is a link.*: replace it by"):
        resume(unfinished)
    assert precious.read_text() == "not a line of this run\n" * 99


@pytest.mark.parametrize("name", ["tensorboard", "checkpoints"])
def test_a_folder_is_not_written_through_a_link(unfinished: Path, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(unfinished / name, elsewhere)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    replace_by_link(unfinished / name, elsewhere)
    metrics = (unfinished / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=rf"run/{name} is a link"):
        resume(unfinished)
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before
    assert (unfinished / "metrics.jsonl").read_bytes() == metrics


def test_an_event_file_is_no_link(unfinished: Path, tmp_path: Path) -> None:
    (unfinished / "tensorboard" / "events.out.tfevents.1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"tensorboard/events\.out\.tfevents\.1 is a link"):
        resume(unfinished)
    assert not (tmp_path / "elsewhere").exists()


def test_it_is_one_line_for_the_user(
    unfinished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_by_link(unfinished / "metrics.jsonl", tmp_path / "not there")
    assert main(["train", "--resume", str(unfinished)]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"longspan: {unfinished}/metrics.jsonl is a link")
    assert not (tmp_path / "not there").exists()


def test_a_checkpoint_that_is_a_link_is_replaced(
    unfinished: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    last = unfinished / "checkpoints" / "last.safetensors"
    shutil.copy(last, tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere").read_bytes()
    replace_by_link(last, tmp_path / "elsewhere")
    assert outcome(resume(unfinished).path) == outcome(uninterrupted)
    assert (tmp_path / "elsewhere").read_bytes() == before


def test_the_run_folder_itself_may_be_named_by_a_link(
    unfinished: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    (tmp_path / "latest").symlink_to(unfinished)
    resume(tmp_path / "latest")
    assert outcome(unfinished) == outcome(uninterrupted)


def test_a_link_made_after_the_check_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        Journal(tmp_path / "metrics.jsonl")
    assert not (tmp_path / "elsewhere").exists()


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(UserError, match="not a regular file"):
        open_to_append(tmp_path / "metrics.jsonl")
