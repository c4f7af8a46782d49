"""`data remove` and `data clean` remove what Longspan made, and nothing else."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from longspan.cli import main
from longspan.data import corpora, named_paths
from longspan.home import home


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "novel.txt"
    path.write_text("a line of text\n" * 200)
    assert main(["data", "add", "novels", str(path)]) == 0
    assert main(["data", "add", "novels-2", str(path)]) == 0
    for name in ("novels", "novels-2"):
        assert main(["data", "info", name]) == 0
    return path


def made_from() -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in (home() / "tokens").glob("*"))


def kept() -> list[str]:
    """What is in the cache folder, without lock files: another process may wait for one."""
    return sorted(path.name for path in home().iterdir() if path.suffix != ".lock")


def test_an_added_name_is_forgotten_and_its_text_stays(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made_from() == ["novels", "novels-2"]
    assert main(["data", "remove", "novels"]) == 0
    assert list(named_paths.registered()) == ["novels-2"]
    assert made_from() == ["novels-2"]
    assert text.is_file()
    capsys.readouterr()
    assert main(["data", "remove", "novels"]) == 1
    assert "'novels' is not a corpus that was added or downloaded; did you mean" in capsys.readouterr().err


def test_a_downloaded_corpus_is_deleted(capsys: pytest.CaptureFixture[str]) -> None:
    folder, archive = corpora.folder_of("text8"), home() / "downloads" / "text8.zip"
    for path in (folder / "text8", archive):
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(1_000_000))
    assert main(["data", "remove", "text8"]) == 0
    assert capsys.readouterr().out.endswith("'text8' was removed: 2.0 MB freed\n")
    assert not folder.exists()
    assert not archive.exists()
    assert main(["data", "remove", "python"]) == 1  # it belongs to Python


def test_clean_keeps_names_texts_and_downloads(text: Path, tmp_path: Path) -> None:
    download = home() / "downloads" / "text8.zip"
    download.parent.mkdir()
    download.touch()
    with gzip.open(tmp_path / "packed.txt.gz", "wt") as file:
        file.write("a line of text\n" * 200)
    assert main(["data", "info", str(tmp_path / "packed.txt.gz")]) == 0
    assert {"checked", "content", "tokens", "unpacked"} <= set(kept())
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    (home() / "tokens" / "link").symlink_to(outside)
    assert main(["data", "clean"]) == 0
    assert kept() == ["corpora.json", "downloads"]
    assert (outside / "file").exists()
    assert main(["data", "info", "novels"]) == 0
    assert main(["data", "clean", "--downloads"]) == 0
    assert kept() == ["corpora.json"]
    assert text.is_file()
    assert main(["data", "clean"]) == 0  # nothing left to remove
