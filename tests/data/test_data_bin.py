"""Folders that fairseq prepared: fairseq's numbers, and a model of fairseq's that is scored on them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from longspan.cli import main
from longspan.config import DataConfig, TokenizerConfig
from longspan.data import prepare
from longspan.errors import UserError
from tests.interop.checkpoints import Original

CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}
WORDS = [f"w{number}" for number in range(56)]  # with fairseq's four: the 60 of the recorded model


def write_split(folder: Path, split: str, sentences: list[list[int]], dtype: str = "uint16") -> None:
    """As `fairseq-preprocess` does, with its default --dataset-impl mmap."""
    arrays = [np.array(sentence, dtype=dtype) for sentence in sentences]
    (folder / f"{split}.bin").write_bytes(b"".join(array.tobytes() for array in arrays))
    sizes = np.array([len(array) for array in arrays], dtype=np.int32)
    pointers = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64) * np.dtype(dtype).itemsize
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, CODES[dtype], len(arrays))
    (folder / f"{split}.idx").write_bytes(header + sizes.tobytes() + pointers.tobytes())


def sentences(seed: int, count: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[*rng.integers(4, 60, rng.integers(1, 9)).tolist(), 2] for _ in range(count)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "data-bin"
    made.mkdir()
    (made / "dict.txt").write_text("".join(f"{word} {100 - n}\n" for n, word in enumerate(WORDS)))
    for seed, split in enumerate(("train", "valid", "test")):
        write_split(made, split, sentences(seed, 40))
    return made


def prepared(folder: Path, kind: str = "fairseq"):
    return prepare(DataConfig(corpus=str(folder), tokenizer=TokenizerConfig(kind=kind)))


@pytest.mark.parametrize("dtype", CODES)
def test_the_numbers_are_those_of_fairseq(folder, dtype):
    write_split(folder, "valid", sentences(7, 50), dtype)
    found = prepared(folder)
    for split, made in (("train", sentences(0, 40)), ("valid", sentences(7, 50)), ("test", sentences(2, 40))):
        assert found.splits[split].tokens.tolist() == [number for line in made for number in line]
    assert found.tokenizer.vocabulary_size == 60
    assert found.tokenizer.encode("w0 w55 what\nw1").tolist() == [4, 59, 3, 2, 5]
    assert found.tokenizer.decode([4, 5, 2, 59]) == "w0 w1\nw55"


def test_the_index_is_checked_in_parts(folder, monkeypatch):
    monkeypatch.setattr("longspan.data.data_bin._SENTENCES", 7)
    assert prepared(folder).splits["train"].tokens.tolist() == [
        number for line in sentences(0, 40) for number in line
    ]
    for sentence in (6, 7, 8, 39):  # where the second part begins, around it, and the last
        write_split(folder, "train", sentences(0, 40))
        change(folder / "train.idx", 26 + 4 * 40 + 8 * sentence, 255)
        with pytest.raises(UserError, match="damaged, or not from fairseq"):
            prepared(folder)


def test_train_alone_is_cut_into_three(folder):
    for split in ("valid", "test"):
        (folder / f"{split}.bin").unlink()
    tokens = [number for line in sentences(0, 40) for number in line]
    found = prepared(folder).splits
    parts = [found[split].tokens.tolist() for split in ("train", "valid", "test")]
    assert [*parts[0], *parts[1], *parts[2]] == tokens
    assert [round(100 * len(part) / len(tokens)) for part in parts] == pytest.approx([90, 5, 5], abs=2)


def test_an_imported_model_of_fairseq_is_scored_on_it(folder, tmp_path, capsys):
    made, run = Original.of("fairseq_adaptive_span"), str(tmp_path / "run")
    file = str(made.save(tmp_path / "c.pt"))
    assert main(["import", file, "--kind", made.kind, "--data", str(folder), "--out", run]) == 0
    options = ["--device", "cpu", "--block-length", "16", "--batch-size", "2", "--json"]
    capsys.readouterr()
    assert main(["eval", run, *options]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] > 60
    assert main(["generate", run, "--prompt", "w0 w1", "--tokens", "5", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("w0 w1 ")


def change(path: Path, at: int, value: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] = value
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda folder: change(folder / "train.idx", 0, 0), "damaged, or not from fairseq"),
        (lambda folder: change(folder / "train.idx", 9, 2), "damaged, or not from fairseq"),
        (lambda folder: change(folder / "train.idx", 17, 7), "damaged, or not from fairseq"),
        (lambda folder: change(folder / "train.idx", 25, 200), "damaged, or not from fairseq"),
        (lambda folder: change(folder / "train.idx", 29, 255), "damaged, or not from fairseq"),
        (lambda folder: (folder / "train.bin").write_bytes(b"12"), "damaged, or not from fairseq"),
        (lambda folder: (folder / "train.idx").write_bytes(b""), "damaged, or not from fairseq"),
        (
            lambda folder: (folder / "train.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(40)),
            "--dataset-impl mmap",
        ),
        (
            lambda folder: (folder / "dict.txt").write_text("w0 1\nnothing\n"),
            "line 2 has no word and its count",
        ),
        (lambda folder: (folder / "dict.txt").write_text("w0 1\n"), "the tokens are 0 to 4"),
    ],
)
def test_a_fault_is_one_line(folder, fault, message):
    fault(folder)
    with pytest.raises(UserError) as caught:
        prepared(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_tokenizers_and_other_text_are_refused(folder, tmp_path):
    with pytest.raises(UserError, match="use the fairseq tokenizer"):
        prepared(folder, "byte")
    assert prepared(folder, "number").splits["train"].tokens.tolist()[:3] == sentences(0, 1)[0][:3]
    (tmp_path / "text.txt").write_text("words\n" * 500)
    with pytest.raises(UserError, match="needs a folder that fairseq prepared"):
        prepared(tmp_path / "text.txt")
