"""Files that are not plain text: read by what they are, or refused with one line."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import random
from pathlib import Path

import pytest

from longspan import cli
from longspan.config import DataConfig
from longspan.data import corpora, local, prepare
from longspan.data.corpus import SPLITS
from longspan.errors import UserError

TEXT = "".join(f"line {i}: héllo\n" for i in range(400)).encode()
NOISE = random.Random(0).randbytes(20_000)


def text_of(path: Path, **options: bool) -> bytes:
    corpus = corpora.find(str(path), print, **options)
    return b"".join(b"".join(corpus.read(split)) for split in SPLITS)


@pytest.mark.parametrize("packed", [gzip.compress(TEXT), lzma.compress(TEXT), bz2.compress(TEXT)])
@pytest.mark.parametrize("name", ["text.packed", "text"])
def test_compressed_text_is_unpacked_whatever_its_name(tmp_path, packed, name):
    (tmp_path / name).write_bytes(packed)
    assert text_of(tmp_path / name) == TEXT
    assert b"".join(local.whole_file(tmp_path / name).read("whole")) == TEXT
    (tmp_path / name).write_bytes(gzip.compress(TEXT.upper()))
    assert text_of(tmp_path / name) == TEXT.upper()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (NOISE, "is not text"),
        (NOISE.replace(b"\0", b"a"), r"is not text \(it has [\d,]+ control characters\)"),
        (TEXT + b"\0" + TEXT, r"is not text \(it has 1 NUL bytes\): .* --binary"),
        (TEXT.decode().encode("utf-16"), "is UTF-16: convert it to UTF-8"),
        (TEXT.decode().encode("utf-16-le"), "is not text"),
        (b"\x28\xb5\x2f\xfd" + NOISE, "is compressed with zstd: unpack it first"),
        (b"PK\x03\x04" + NOISE, "is a zip archive: unpack it first"),
        (gzip.compress(NOISE), "is not text"),
        (gzip.compress(TEXT)[:-20], "is damaged and cannot be unpacked"),
        (gzip.compress(TEXT)[:40] + NOISE[:500], "is damaged and cannot be unpacked"),
        (lzma.compress(TEXT)[:-20], "is damaged and cannot be unpacked"),
        (bz2.compress(TEXT)[:40] + NOISE[:500], "is damaged and cannot be unpacked"),
    ],
)
def test_what_is_not_text_is_refused_with_one_line(tmp_path, content, complaint):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    for read in (text_of, local.whole_file):
        with pytest.raises(UserError, match=complaint) as caught:
            read(path)
        assert "\n" not in str(caught.value)
    assert text_of(path, binary=True) == content


def test_other_encodings_of_text_are_still_text(tmp_path):
    for number, text in enumerate(
        (TEXT.decode().encode("latin-1"), TEXT + b"\x1b[1m\f\x08", TEXT + b"\x01", b"BZh" + TEXT)
    ):
        (tmp_path / str(number)).write_bytes(text)
        assert text_of(tmp_path / str(number)) == text


def test_own_splits_must_be_text_too(tmp_path):
    for split in SPLITS:
        (tmp_path / f"{split}.txt").write_bytes(TEXT)
    (tmp_path / "test.txt").write_bytes(NOISE)
    with pytest.raises(UserError, match=r"test.txt is not text"):
        text_of(tmp_path)


def test_binary_is_an_option_of_the_byte_tokenizer(tmp_path, capsys):
    path = tmp_path / "noise"
    path.write_bytes(NOISE)
    corpus = prepare(DataConfig(corpus=str(path), binary=True))
    assert b"".join(corpus.splits[split].tokens.tobytes() for split in SPLITS) == NOISE
    assert cli.main(["data", "info", str(path)]) != 0
    assert "is not text" in capsys.readouterr().err
    assert cli.main(["data", "info", str(path), "--binary"]) == 0
    capsys.readouterr()
    assert cli.main(["data", "info", str(path), "--binary", "--tokenizer", "word"]) != 0
    assert "binary takes bytes as they are: use the byte tokenizer" in capsys.readouterr().err


def test_a_folder_says_which_texts_it_leaves_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(TEXT))
    (tmp_path / "c.txt").write_bytes(TEXT.decode().encode("utf-16"))
    (tmp_path / "d.txt").write_bytes(NOISE.replace(b"\0", b"a"))
    with pytest.warns(UserWarning, match=r"2 files in .* are compressed or UTF-16 and are left out"):
        assert text_of(tmp_path) == TEXT


def test_an_unreadable_folder_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / "closed").mkdir()
    real = os.scandir

    def scandir(place):
        if str(place).endswith("closed"):  # root may read every folder
            raise PermissionError(13, "Permission denied", str(place))
        return real(place)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"could not prepare .*: Permission denied \(.*closed\)"):
        prepare(DataConfig(corpus=str(tmp_path)))
