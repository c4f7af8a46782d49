from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.config import DataConfig, TokenizerConfig
from longspan.data import preparation, prepare
from longspan.data.corpus import SPLITS, Piece
from longspan.data.preparation import tokenize
from longspan.data.text import whole_lines
from longspan.data.token_file import write_token_file
from longspan.data.tokenizers.word import WordTokenizer
from longspan.errors import UserError
from longspan.home import home
from tests.data.corpora import corpus_of

TEXT = "".join(f"line {i}: héllo wörld\n" for i in range(300))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def config_for(path: Path, **tokenizer: object) -> DataConfig:
    return DataConfig(corpus=str(path), tokenizer=TokenizerConfig(**tokenizer))


def finished() -> list[Path]:
    """Folders that look like prepared corpora."""
    folder = home() / "tokens"
    return [p for p in folder.iterdir() if not p.name.startswith(".")] if folder.is_dir() else []


def test_bytes_are_the_text_itself(text):
    corpus = prepare(config_for(text))
    read = b"".join(corpus.splits[split].tokens.tobytes() for split in SPLITS)
    assert read == TEXT.encode()
    assert sum(f.num_bytes for f in corpus.splits.values()) == len(TEXT.encode())
    assert sum(f.num_characters for f in corpus.splits.values()) == len(TEXT)
    assert all(
        isinstance(f.tokens, np.memmap) and not f.tokens.flags.writeable for f in corpus.splits.values()
    )


def test_words_count_the_raw_text_they_stand_for(text):
    train = prepare(config_for(text, kind="word")).splits["train"]
    assert train.num_tokens == 5 * TEXT.count("\n", 0, train.num_characters)
    raw = TEXT.encode()[: train.num_bytes]
    assert len(raw.decode()) == train.num_characters


@settings(max_examples=50, deadline=None)
@given(chunks=st.lists(st.text("ab \t\n", max_size=5), max_size=6))
def test_words_are_counted_like_word_tokens_however_chunks_fall(tmp_path_factory, chunks):
    """So a perplexity per word is what papers call perplexity of a word-level model."""
    tokenizer = WordTokenizer(["a", "<eos>", "<unk>"])
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    token_file = write_token_file(path, tokenizer, [chunk.encode() for chunk in chunks])
    assert token_file.num_words == token_file.num_tokens
    assert token_file.num_characters == token_file.num_bytes == len("".join(chunks))


@pytest.mark.parametrize(("words", "dtype"), [(200, "uint8"), (300, "uint16"), (70_000, "uint32")])
def test_the_smallest_integers_that_fit(tmp_path, words, dtype):
    corpus = corpus_of(tmp_path, train=" ".join(f"w{i}" for i in range(words)).encode())
    train = tokenize(corpus, TokenizerConfig(kind="word", order="first-seen")).splits["train"]
    assert (train.dtype, train.tokens.dtype) == (dtype, np.dtype(dtype))
    assert train.path.stat().st_size == len(train) * np.dtype(dtype).itemsize
    np.testing.assert_array_equal(train.tokens, np.arange(words + 1))


def test_the_second_time_nothing_is_written(text):
    first = prepare(config_for(text))
    stamps = {path: path.stat().st_mtime_ns for path in home().rglob("*")}
    lines: list[str] = []
    second = prepare(config_for(text), lines.append)
    assert lines == []
    assert (second.fingerprint, second.splits) == (first.fingerprint, first.splits)
    assert {path: path.stat().st_mtime_ns for path in home().rglob("*")} == stamps


def test_the_fingerprint_follows_content_and_settings(text, tmp_path):
    first = prepare(config_for(text)).fingerprint
    os.utime(text)  # another time, the same text
    assert prepare(config_for(text)).fingerprint == first
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / "text.txt"
    copy.write_bytes(text.read_bytes())
    assert prepare(config_for(copy)).fingerprint == first
    assert prepare(config_for(text, lowercase=True)).fingerprint != first
    changed = bytearray(text.read_bytes())
    changed[5] ^= 1
    text.write_bytes(changed)  # the same size
    os.utime(text, ns=(0, 12345))
    assert prepare(config_for(text)).fingerprint != first
    assert prepare(config_for(text)).splits["train"].tokens[5] == changed[5]


def test_an_unchanged_file_is_not_read_again(text, monkeypatch):
    prepare(config_for(text))
    monkeypatch.setattr("longspan.data.corpus.Corpus.read", lambda *args: pytest.fail("read again"))
    prepare(config_for(text))


def test_a_writer_that_fails_leaves_nothing(text, monkeypatch):
    written = []

    def fails_at_the_second(path, tokenizer, chunks):
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)
        return real(path, tokenizer, chunks)

    real = preparation.write_token_file
    monkeypatch.setattr(preparation, "write_token_file", fails_at_the_second)
    with pytest.raises(UserError, match=r"could not prepare .*: No space left on device"):
        prepare(config_for(text))
    assert written
    assert list((home() / "tokens").iterdir()) == []


def test_two_preparations_at_once_agree(text, monkeypatch):
    """The second one finishes while the first is writing; the first finds its place taken."""
    real, overtaken = preparation.write_token_file, []

    def overtakes(path, tokenizer, chunks):
        if not overtaken:
            overtaken.append(path)
            overtaken.append(prepare(config_for(text)))
        return real(path, tokenizer, chunks)

    monkeypatch.setattr(preparation, "write_token_file", overtakes)
    corpus = prepare(config_for(text))
    assert corpus.splits == overtaken[1].splits
    assert [path.name for path in (home() / "tokens").iterdir()] == [corpus.folder.name]


KILLED = """
import sys, time
from longspan.config import DataConfig
from longspan.data import preparation
real = preparation.write_token_file
def slow(path, tokenizer, chunks):
    if path.name.startswith("valid"):
        print("half", flush=True)
        time.sleep(60)
    return real(path, tokenizer, chunks)
preparation.write_token_file = slow
preparation.prepare(DataConfig(corpus=sys.argv[1]))
"""


def test_a_killed_preparation_leaves_nothing_that_looks_complete(text):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(text)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "half\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    assert list((home() / "tokens").rglob("train.tokens"))  # it was in the middle of it
    assert finished() == []
    corpus = prepare(config_for(text))
    assert b"".join(corpus.splits[split].tokens.tobytes() for split in SPLITS) == TEXT.encode()
    assert finished() == [corpus.folder]
    assert [*(home() / "tokens").iterdir()] == [corpus.folder]  # nor is the killed one's half in the way


@pytest.mark.parametrize("victim", ["train.tokens", "test.tokens", "corpus.json", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_damaged_token_files_are_made_again(text, victim, damage):
    folder = prepare(config_for(text)).folder
    path = folder / victim
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3])
    lines: list[str] = []
    corpus = prepare(config_for(text), lines.append)
    assert "is incomplete: preparing it again" in lines[0]
    assert b"".join(corpus.splits[split].tokens.tobytes() for split in SPLITS) == TEXT.encode()


def test_a_flipped_bit_is_found_by_the_checksum(text):
    token_file = prepare(config_for(text)).splits["train"]
    token_file.verify()
    data = bytearray(token_file.path.read_bytes())
    data[100] ^= 4
    token_file.path.write_bytes(data)
    with pytest.raises(UserError, match=r"train.tokens is damaged: delete the folder"):
        prepare(config_for(text)).splits["train"].verify()


@pytest.mark.parametrize("kind", ["byte", "sha-rnn"])
def test_a_corpus_larger_than_memory_is_streamed(tmp_path, kind):
    size = 64 << 20
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(size)
    small = corpus_of(tmp_path, "bytes", valid=b"\0\n", test=b"\0\n")
    corpus = dataclasses.replace(small, splits={**small.splits, "train": (Piece.whole(sparse),)})
    tracemalloc.start()
    train = tokenize(corpus, TokenizerConfig(kind=kind)).splits["train"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(train) >= size
    assert peak < size


def test_a_word_larger_than_memory_is_cut(monkeypatch):
    monkeypatch.setattr("longspan.data.text._LONGEST_WORD", 10)
    texts = ["one\ntwo", *["abcd"] * 7, "ef gh", "ij\n"]
    parts = list(whole_lines(texts))
    assert parts == ["one\n", "twoabcdabcd", "abcdabcdabcd", "abcdabcdef", " ghij\n"]


def test_an_empty_split_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="the valid split of small is empty"):
        tokenize(corpus_of(tmp_path, valid=b""), TokenizerConfig())


@pytest.mark.parametrize(
    ("split", "tokenizer"),
    [
        ("train", TokenizerConfig(kind="number")),
        ("test", TokenizerConfig(kind="sentencepiece-default", vocabulary_size=30)),
    ],
)
def test_a_split_of_blanks_may_have_no_tokens(tmp_path, split, tokenizer):
    texts = {**dict.fromkeys(SPLITS, b"1 2\n"), split: b" \n"}
    corpus = corpus_of(tmp_path, **texts)
    for _ in range(2):
        with pytest.raises(UserError, match=f"^the {split} split of small has no tokens"):
            tokenize(corpus, tokenizer)
        assert finished() == []


def test_empty_token_files_are_not_complete(tmp_path):
    empty = write_token_file(tmp_path / "test.tokens", WordTokenizer(["<unk>"]), [])
    assert not empty.is_complete()


def test_progress_is_short_lines(text):
    lines: list[str] = []
    prepare(config_for(text), lines.append)
    assert lines[0] == "preparing text: 0.0 MB, byte tokens"
    assert len(lines) == 4
    assert all("\n" not in line for line in lines)
