"""Faults of odd input: huge vocabularies, checkpoints without a part, files that cannot be written."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from longspan import __main__ as entry
from longspan.cli import main
from longspan.config.data import LARGEST_VOCABULARY
from longspan.data import corpora
from longspan.runs import checkpoint
from tests.training.runs import small_config, write_text
from tests.using.test_cli import complaint, misuse
from tests.using.tiny import run_folder


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece", "word"])
@pytest.mark.parametrize("size", [2**22 + 1, 10**12, 2**63 - 1])
def test_huge_vocabularies(kind: str, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 90)
    words = ["data", "info", tmp_path / "a.txt", "--tokenizer", kind, "--vocabulary-size", size]
    wanted = f"vocabulary_size must be between 1 and {LARGEST_VOCABULARY:,}, not {size:,}"
    assert wanted in misuse(capsys, *words)


def test_checkpoints_without_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from longspan.training import train

    run = train(small_config(write_text(tmp_path), stage__0__steps=2, stage__1__steps=1), tmp_path / "run")
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(lines[:-1]))
    before, last = run.metrics.read_bytes(), run.checkpoint("last")
    saved = checkpoint.load(last)
    progress = saved.facts["progress"]
    changed = [{name: value for name, value in saved.facts.items() if name != part} for part in saved.facts]
    old = {"fixed_options", "optimizer_tensors", "done"}  # checkpoints of earlier versions have none
    changed = [facts for facts in changed if old <= facts.keys()]
    odd = (None, [1], {"step": 1}, progress | {"position": None}, progress | {"position": [1]})
    changed += [saved.facts | {"progress": value} for value in odd]
    changed += [saved.facts | {"done": value} for value in (None, "1", 1.5, float("nan"))]
    changed += [saved.facts | {"progress": {k: v for k, v in progress.items() if k != "position"}}]
    for facts in changed:
        checkpoint.save(last, saved.tensors, facts)
        assert str(last) in complaint(capsys, "train", "--resume", run.path, "--quiet")
    one = next(name for name in sorted(saved.tensors) if name.startswith("optimizer."))
    for part in ("generator.", "state.", "optimizer.", one):
        tensors = {name: t for name, t in saved.tensors.items() if not name.startswith(part)}
        checkpoint.save(last, tensors, saved.facts)
        assert f"it lacks '{part}" in complaint(capsys, "train", "--resume", run.path, "--quiet")
    assert run.metrics.read_bytes() == before
    names = sorted(path.name for path in last.parent.iterdir())
    assert names == ["best.safetensors", "last.safetensors"]  # nothing was renamed or replaced


def test_a_finished_run_whose_checkpoint_has_no_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from longspan.training import train

    run = train(small_config(write_text(tmp_path), stage__0__steps=2, stage__1__steps=1), tmp_path / "run")
    saved = checkpoint.load(run.checkpoint("last"))
    without = {name: value for name, value in saved.facts.items() if name != "progress"}
    for facts in (without, saved.facts | {"progress": None}):
        checkpoint.save(run.checkpoint("last"), saved.tensors, facts)
        assert main(["train", "--resume", str(run.path)]) == 0
        assert "is finished: nothing to do" in "".join(capsys.readouterr())


def test_files_that_cannot_be_written_are_found_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("longspan.bench.Bench.__init__", lambda *_, **__: pytest.fail("it measures"))
    assert "file is not a folder" in complaint(capsys, "bench", "--json", tmp_path / "file" / "a.json")


def test_spans_of_a_run_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run")
    (run.path / "spans.png").mkdir()  # no file can be put there, even by root
    assert main(["spans", str(run.path)]) == 0
    out, err = capsys.readouterr()
    assert "head 1  head 2" in out
    assert "there is no picture" in err


def test_an_interrupt_during_the_imports_is_one_line() -> None:
    code = (
        "import builtins, os, signal, sys\n"
        "from longspan import __main__ as entry\n"
        "plain = builtins.__import__\n"
        "def slow(name, *rest, **more):\n"
        "    if name == 'longspan.cli': os.kill(os.getpid(), signal.SIGINT)\n"
        "    return plain(name, *rest, **more)\n"
        "builtins.__import__ = slow\n"
        "sys.exit(entry.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "longspan: stopped\n")
    assert signal.getsignal(signal.SIGINT) is not entry._leave


def test_archives_of_wikitext_have_sha256() -> None:
    for name in ("wikitext-2", "wikitext-103"):
        assert corpora.ARCHIVES[name].checksum.startswith("sha256:")
