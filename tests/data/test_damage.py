"""Damaged caches and texts that changed unnoticed: found when they are opened."""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from pathlib import Path

import pytest

from longspan import cli
from longspan.config import DataConfig
from longspan.data import checksums, corpora, preparation, prepare
from longspan.data.download import Archive, unpacked
from longspan.errors import UserError
from longspan.home import home


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i}\n" for i in range(500)))
    return path


def flip(path: Path, at: int = 100) -> None:
    """Change a bit, and set the time of the content back."""
    times = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_a_flipped_bit_in_a_token_file_is_found_when_it_is_opened(text, split):
    config = DataConfig(corpus=str(text))
    flip(prepare(config).splits[split].path)
    with pytest.raises(UserError, match=rf"{split}.tokens is damaged: delete the folder"):
        prepare(config)


def test_tokens_beyond_the_vocabulary_are_one_clear_line(text):
    config = DataConfig(corpus=str(text), tokenizer=preparation.TokenizerConfig(kind="character"))
    folder = prepare(config).folder
    about = json.loads((folder / "corpus.json").read_text())
    data = bytearray((folder / "test.tokens").read_bytes())
    data[7] = 200
    (folder / "test.tokens").write_bytes(data)
    about["splits"]["test"]["crc32"] = checksums.crc32(folder / "test.tokens")
    del about["checksum"]
    (folder / "corpus.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"test.tokens has the token 200, but the vocabulary is 0 to 1\d"):
        prepare(config)


def test_token_files_are_read_once_per_change(text, monkeypatch):
    prepare(DataConfig(corpus=str(text)))
    monkeypatch.setattr("longspan.data.TokenFile._read_all", lambda self: pytest.fail("read again"))
    prepare(DataConfig(corpus=str(text)))


@pytest.mark.parametrize("victim", ["corpus.json", "tokenizer/tokenizer.json"])
def test_changed_facts_or_tokenizers_are_made_again(text, victim):
    config = DataConfig(corpus=str(text), tokenizer=preparation.TokenizerConfig(kind="character"))
    path = prepare(config).folder / victim
    good = path.read_text()
    facts = json.loads(good)
    if victim == "corpus.json":
        facts["splits"]["test"]["num_bytes"] += 1
    else:
        facts["characters"] = facts["characters"].replace("l", "q")
    path.write_text(json.dumps(facts))
    lines: list[str] = []
    prepare(config, lines.append)
    assert "is incomplete: preparing it again" in lines[0]
    assert path.read_text() == good


def test_a_text_with_the_same_size_and_time_but_new_content_is_noticed(text):
    before = prepare(DataConfig(corpus=str(text))).fingerprint
    flip(text)
    after = prepare(DataConfig(corpus=str(text)))
    assert after.fingerprint != before
    assert after.splits["train"].tokens[100] == text.read_bytes()[100]


def test_samples_notice_new_content_where_a_file_system_keeps_no_times(text, monkeypatch):
    with text.open("rb") as file:
        first = os.fstat(file.fileno())
    monkeypatch.setattr(os, "fstat", lambda descriptor: first)
    before = checksums.stamp(text)
    flip(text)
    assert checksums.stamp(text) != before


def test_an_unpacked_corpus_must_have_its_size(capsys):
    folder = corpora.folder_of("text8")
    folder.mkdir(parents=True)
    (folder / "text8").write_text("abcd")
    assert cli.main(["data", "get", "text8"]) != 0
    said = capsys.readouterr()
    assert "text8 is damaged or missing: delete the folder" in said.err
    assert "bytes" not in said.out


@pytest.mark.parametrize("damage", ["flipped", "shorter", "removed"])
def test_a_damaged_unpacked_file_is_noticed(tmp_path, damage):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("inside/text", "some text\n" * 100)
    (tmp_path / "corpus.zip").write_bytes(packed.getvalue())
    checksum = f"sha256:{hashlib.sha256(packed.getvalue()).hexdigest()}"
    archive = Archive("corpus.zip", checksum, ("https://example.org/corpus.zip",), {"inside/text": "text"})
    folder = unpacked(archive, tmp_path / "corpus", tmp_path, print)
    unpacked(archive, tmp_path / "corpus", tmp_path, print)
    if damage == "flipped":
        flip(folder / "text")
    elif damage == "shorter":
        (folder / "text").write_text("some")
    else:
        (folder / "text").unlink()
    with pytest.raises(UserError, match=r"text is damaged or missing: delete the folder .*corpus"):
        unpacked(archive, tmp_path / "corpus", tmp_path, print)


def test_verify_reads_everything_again(text, monkeypatch, capsys):
    """Where a change leaves no trace in sizes and times."""
    assert cli.main(["data", "info", str(text)]) == 0
    token_file = next((home() / "tokens").rglob("train.tokens"))
    known = checksums.stamp(token_file)
    flip(token_file)
    real = checksums.stamp
    monkeypatch.setattr(checksums, "stamp", lambda path: known if path == token_file else real(path))
    assert cli.main(["data", "info", str(text)]) == 0
    assert cli.main(["data", "info", str(text), "--verify"]) != 0
    assert "train.tokens is damaged" in capsys.readouterr().err
