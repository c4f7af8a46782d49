"""Encoding with several processes: the same bytes, and no process that stays behind."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longspan import progress
from longspan.config import DataConfig, TokenizerConfig
from longspan.data import corpora, preparation, prepare
from longspan.data.corpus import CHUNK_BYTES, SPLITS, Corpus
from longspan.data.encoding import encoder
from longspan.data.token_file import write_token_file
from longspan.data.tokenizers import fit_tokenizer
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.data.tokenizers.vocabulary import count_words, in_order
from longspan.data.tokenizers.word import WordTokenizer
from longspan.data.workers import Workers, processes_for, use_processes
from longspan.errors import UserError
from tests.data.corpora import corpus_of

PATIENCE = 60.0
LINES = "".join(f"line {i}: héllo wörld {i % 7} £{'x' * (i % 13)}\n" for i in range(150)).encode()
TEXTS = {
    "lines": LINES,
    "no end": LINES[:-1],
    "not UTF-8": LINES.replace(b"w\xc3\xb6rld", b"w\xf6rld \x80\xff"),
    "one line": LINES.replace(b"\n", b" "),
}


def chunks_of(text: bytes, size: int = 1000) -> list[bytes]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize(
    "config",
    [
        TokenizerConfig(kind="word", vocabulary_size=200),
        TokenizerConfig(kind="word", lowercase=True),
        TokenizerConfig(kind="transformer-xl"),
        TokenizerConfig(kind="bpe", vocabulary_size=300),
        TokenizerConfig(kind="sentencepiece", vocabulary_size=300),
        TokenizerConfig(kind="sentencepiece-default", vocabulary_size=60),
    ],
    ids=lambda config: f"{config.kind}{'-lower' * config.lowercase}",
)
def test_two_processes_write_the_same_bytes_as_one(tmp_path, config):
    train = b"\n".join(TEXTS.values())
    tokenizer = fit_tokenizer(config, corpus_of(tmp_path / "corpus", train=train))
    with use_processes(2), encoder(tokenizer, 0) as both:
        assert both is not tokenizer
        for name, text in TEXTS.items():
            alone = write_token_file(tmp_path / f"{name} 1", tokenizer, chunks_of(text))
            together = write_token_file(tmp_path / f"{name} 2", both, chunks_of(text))
            assert together.path.read_bytes() == alone.path.read_bytes()
            assert together.facts() == alone.facts()


def test_a_corpus_does_not_depend_on_the_processes(tmp_path, monkeypatch):
    real = Corpus.read
    monkeypatch.setattr(Corpus, "read", lambda self, split: real(self, split, 500))
    (tmp_path / "text.txt").write_bytes(LINES)
    prepared = {}
    for processes in (1, 3):
        monkeypatch.setenv("LONGSPAN_HOME", str(tmp_path / f"home-{processes}"))
        tokenizer = TokenizerConfig(kind="word")
        config = DataConfig(corpus=str(tmp_path / "text.txt"), tokenizer=tokenizer, processes=processes)
        folder = prepare(config).folder
        prepared[processes] = (
            {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()},
            folder.name,
        )
    assert prepared[1] == prepared[3]


def test_a_mistake_in_the_text_is_the_first_one_and_the_same_line(tmp_path):
    tokenizer = WordTokenizer(["a", "<eos>"], unknown=False)
    text = b"a a\n" * 100 + b"b\n" + b"a a\n" * 100 + b"c\n"
    said = []
    for processes in (1, 2):
        with use_processes(processes), encoder(tokenizer, 0) as encoding, pytest.raises(UserError) as caught:
            write_token_file(tmp_path / f"{processes}", encoding, chunks_of(text, 40))
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "the words 'b':" in said[0]


def test_a_process_that_is_killed_is_one_clear_line():
    with Workers("count-words", 2) as workers:
        workers._children[1]._process.kill()
        with pytest.raises(UserError, match=r"a process that prepares text was stopped: .*data.processes"):
            list(workers.map([b"a\n"] * 10))


@pytest.mark.parametrize(
    ("num_bytes", "processes", "used"),
    [
        (0, None, 1),
        (CHUNK_BYTES, None, 1),  # small texts stay in this process
        (5 * CHUNK_BYTES, None, 2),
        (100 * CHUNK_BYTES, None, 4),  # the usable cores
        (CHUNK_BYTES, 3, 3),
        (100 * CHUNK_BYTES, 1, 1),
    ],
)
def test_how_many_processes(monkeypatch, num_bytes, processes, used):
    monkeypatch.setattr("longspan.data.workers.usable_cores", lambda: 4)
    with use_processes(processes):
        assert processes_for(num_bytes) == used


def test_bytes_and_tokenizers_of_plugins_are_encoded_here():
    own = type("Own", (WordTokenizer,), {"__module__": "a_plugin"})(["<unk>"])
    for tokenizer in (ByteTokenizer(), own):
        with use_processes(2), encoder(tokenizer, 0) as found:
            assert found is tokenizer


@pytest.mark.parametrize("order", ["frequency", "first-seen", "sorted"])
def test_words_are_counted_by_processes_as_by_one(order):
    texts = [text.decode("utf-8", "surrogateescape") for text in chunks_of(TEXTS["no end"], 300)]
    alone = count_words(texts)
    with use_processes(2):
        together = count_words(texts)
    assert list(together.items()) == list(alone.items())
    assert in_order(together, order) == in_order(alone, order)


def test_files_are_unpacked_and_extracted_by_processes_as_by_one(tmp_path, monkeypatch):
    for number in range(30):
        content = "".join(json.dumps({"text": f"text {number} {line}"}) + "\n" for line in range(3))
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    found = []
    for processes in (1, 2):
        monkeypatch.setenv("LONGSPAN_HOME", str(tmp_path / f"home-{processes}"))
        with use_processes(processes):
            corpus = corpora.find(f"{tmp_path}/*.jsonl.gz", print)
        found.append({split: b"".join(corpus.read(split)) for split in SPLITS})
    assert found[0] == found[1]
    assert b"text 7 2\n" in found[0]["train"] + found[0]["valid"] + found[0]["test"]
    (tmp_path / "4.jsonl.gz").write_bytes(gzip.compress(b"{"))
    (tmp_path / "5.jsonl.gz").write_bytes(gzip.compress(b"{"))
    with use_processes(2), pytest.raises(UserError, match=r"line 1 of .*/4.jsonl.gz is not JSON"):
        corpora.find(f"{tmp_path}/*.jsonl.gz", print)


def test_an_error_of_the_system_keeps_its_file(tmp_path):
    with Workers("text-file", 1, field=None) as workers, pytest.raises(FileNotFoundError) as caught:
        list(workers.map([os.fsencode(tmp_path / "nowhere")]))
    assert caught.value.filename == str(tmp_path / "nowhere")


def test_large_texts_show_how_far_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0.01)
    real = Corpus.read

    def slow(self, split):
        for chunk in real(self, split, 1 << 20):
            yield chunk
            time.sleep(0.05)

    monkeypatch.setattr(Corpus, "read", slow)
    (tmp_path / "text.txt").write_bytes(LINES * 500)
    said: list[str] = []
    prepare(DataConfig(corpus=str(tmp_path / "text.txt")), said.append)
    size = f"{len(LINES * 500) * 9 // 10:,}"[:5]
    assert any(line.startswith("preparing text: encoding train: 100%, ") and size in line for line in said)


ENDLESS = """
import itertools, signal, sys
from longspan.cli import main
from longspan.data.corpus import Corpus
signal.signal(signal.SIGINT, signal.default_int_handler)
real = Corpus.read
def endless(self, split, chunk_bytes=0):
    if sys._getframe(1).f_code.co_name == "followed":
        print("encoding", flush=True)
        return itertools.repeat(b"some words\\n" * 10_000)
    return real(self, split)
Corpus.read = endless
sys.exit(main(["data", "info", sys.argv[1], "--tokenizer", "word", "--processes", "2"]))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("how", ["Ctrl-C", "killed"])
def test_no_process_stays_behind(tmp_path, how):
    (tmp_path / "text.txt").write_bytes(LINES)
    parent = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path / "text.txt")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout.readline() == "encoding\n"
    children = children_of(parent.pid)
    assert len(children) == 2
    time.sleep(0.5)  # they are at work
    began = time.monotonic()
    if how == "killed":
        parent.kill()
    else:
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does: all processes get it
    _, err = parent.communicate(timeout=PATIENCE)
    until(lambda: not any(Path(f"/proc/{process}").exists() for process in children))
    assert time.monotonic() - began < 10  # less than a second on a quiet machine
    if how == "Ctrl-C":
        assert parent.returncode == 130
        assert err.endswith("longspan: stopped\n")
        assert list((Path(os.environ["LONGSPAN_HOME"]) / "tokens").iterdir()) == []


def children_of(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(word) for task in tasks for word in (task / "children").read_text().split()]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_splits_of_a_prepared_corpus_are_complete(tmp_path):
    """Processes that encode a whole corpus leave out nothing at the ends of splits."""
    corpus = corpus_of(tmp_path, train=LINES, valid=LINES[:-1], test=b"one line")
    with use_processes(2):
        prepared = preparation.tokenize(corpus, TokenizerConfig(kind="word"))
    for split in SPLITS:
        lines = b"".join(corpus.read(split)).count(b"\n") + (split != "train")
        eos = prepared.tokenizer.encode("\n")[0]
        assert (prepared.splits[split].tokens == eos).sum() == lines
