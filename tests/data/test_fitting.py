"""Learning a vocabulary: as the libraries do, on a part of a large text, and in a way that can be stopped."""

from __future__ import annotations

import dataclasses
import io
import os
import random
import re
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from longspan import progress
from longspan.config import DataConfig, TokenizerConfig
from longspan.data import preparation, prepare
from longspan.data.fingerprint import content, digest, fingerprint
from longspan.data.tokenizers import check_settings, fit_tokenizer, fitting
from longspan.errors import UserError
from longspan.progress import every_seconds
from tests.data.corpora import corpus_of

PATIENCE = 60  # seconds for what takes a few, also on a machine with other work


def ordinary(lines: int, distinct: int = 300) -> str:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 7))) for _ in range(distinct)]
    return "".join(" ".join(draw.choices(words, k=8)) + "\n" for _ in range(lines))


def dna(size: int) -> bytes:
    return "".join(random.Random(1).choices("ACGT", k=size)).encode()


def bpe_of(texts: list[str], size: int) -> dict[str, int]:
    model = tokenizers.Tokenizer(models.BPE())
    newlines, level = pre_tokenizers.Split("\n", "merged_with_previous"), pre_tokenizers.ByteLevel(False)
    model.pre_tokenizer = pre_tokenizers.Sequence([newlines, level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(texts, trainer)
    return model.get_vocab()


def test_the_vocabulary_of_an_ordinary_text_is_the_one_of_the_library(tmp_path):
    text = ordinary(400)
    corpus = corpus_of(tmp_path, train=text.encode())
    bpe = fit_tokenizer(TokenizerConfig(kind="bpe", vocabulary_size=400), corpus)
    assert bpe.model.get_vocab() == bpe_of([text], 400)

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.split("\n")[:-1]),
        model_writer=model,
        vocab_size=200,
        hard_vocab_limit=False,
        max_sentence_length=16384,
        num_threads=1,
        minloglevel=2,
        normalization_rule_name="nmt_nfkc",
    )
    pieces = fit_tokenizer(TokenizerConfig(kind="sentencepiece-default", vocabulary_size=200), corpus)
    direct = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    names = [direct.id_to_piece(number) for number in range(direct.vocab_size())]
    assert [pieces._pieces.id_to_piece(number) for number in range(pieces.vocabulary_size)] == names


def test_of_a_large_text_every_nth_line_is_used(tmp_path, monkeypatch):
    text = ordinary(900)
    corpus = corpus_of(tmp_path, train=text.encode())
    config = TokenizerConfig(kind="bpe", vocabulary_size=400)
    part = list(islice(text.splitlines(keepends=True), 0, None, 3))
    assert bpe_of(part, 400) != bpe_of([text], 400)
    wanted = len(text) * 2 // 5
    sampled = fit_tokenizer(dataclasses.replace(config, fit_bytes=wanted), corpus)
    assert sampled.model.get_vocab() == bpe_of(part, 400)

    before = fingerprint(corpus, config)
    monkeypatch.setattr(fitting, "FIT_BYTES", wanted)  # as if the text were large
    assert fit_tokenizer(config, corpus).model.get_vocab() == bpe_of(part, 400)
    every = fit_tokenizer(dataclasses.replace(config, fit_bytes=0), corpus)
    assert every.model.get_vocab() == bpe_of([text], 400)
    assert fingerprint(corpus, config) != before


def test_fingerprints_of_older_versions_stay(tmp_path):
    corpus = corpus_of(tmp_path, train=b"some text\n" * 50)
    for kind, size in (("byte", None), ("bpe", 300)):
        config = TokenizerConfig(kind=kind, vocabulary_size=size)
        old = {"kind": kind, "vocabulary_size": size, "lowercase": False, "order": "frequency"}
        facts = {"version": 2, "text": content(corpus), "form": "words", "tokenizer": old}
        assert fingerprint(corpus, config) == digest(facts)


@pytest.mark.parametrize(
    ("kind", "size", "text"),
    [
        ("sentencepiece", 1000, dna(400_000)),
        ("sentencepiece", 500, b"ab" * 100_000),
        ("bpe", 1000, dna(1_000_000)),
    ],
)
def test_a_text_without_blanks_ends(tmp_path, kind, size, text):
    corpus = corpus_of(tmp_path, train=text, valid=text[:2000], test=text[:2000])
    began = time.monotonic()
    tokenized = preparation.tokenize(corpus, TokenizerConfig(kind=kind, vocabulary_size=size))
    assert time.monotonic() - began < PATIENCE
    assert tokenized.tokenizer.decode(tokenized.splits["test"].tokens) == text[:2000].decode()
    assert len(tokenized.splits["train"]) < len(text) / 2


def test_long_words_are_cut_and_the_rest_of_the_text_is_kept(tmp_path):
    run = "".join(random.Random(2).choices("xyz", k=3000))
    text = f"one line\nbefore {run} after\nlast line"
    corpus = corpus_of(tmp_path, train=text.encode())
    parts = list(fitting.fit_texts(TokenizerConfig(), corpus))
    assert "".join(parts) == text
    assert parts[0] == "one line\nbefore "
    cut = [part for part in parts if part and part in run]
    assert [len(part) for part in cut] == [64] * 46 + [56]
    few = list(fitting.fit_texts(TokenizerConfig(), corpus, long_words=1000))
    assert few == [part for part in parts if part not in cut or cut.index(part) % 4 == 0]


def test_progress_is_told_while_a_vocabulary_is_learned(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0.01)
    (tmp_path / "text.txt").write_text(ordinary(6000))
    said: list[str] = []
    prepare(
        DataConfig(
            corpus=str(tmp_path / "text.txt"), tokenizer=TokenizerConfig(kind="bpe", vocabulary_size=400)
        ),
        said.append,
    )
    for what in (
        r"learning the bpe vocabulary, \d+:\d\d",
        r"encoding train: \d+%, [\d,]+ of [\d,]+ bytes, .*",
    ):
        assert any(re.fullmatch(f"preparing text: {what}", line) for line in said)


def test_telling_ends_with_the_block():
    told: list[float] = []
    with every_seconds(0.01, told.append):
        while len(told) < 2:
            time.sleep(0.01)
    count = len(told)
    time.sleep(0.05)
    assert len(told) == count
    assert told == sorted(told)


# A shell without job control starts programs in the background with SIGINT ignored, and children inherit it.
FIT = """
import signal, sys
from longspan.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(["data", "info", sys.argv[1], "--tokenizer", "sentencepiece", "--vocabulary-size", "8000"]))
"""


def children_of(process: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_control_c_ends_it_and_leaves_no_process(tmp_path):
    if not Path("/proc/self/task").is_dir():
        pytest.skip("needs /proc")
    (tmp_path / "text.txt").write_text(ordinary(100_000, distinct=200_000))  # to learn it takes many seconds
    child = subprocess.Popen(
        [sys.executable, "-c", FIT, str(tmp_path / "text.txt")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + PATIENCE
    while not (learning := children_of(child.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)  # it is learning
    began = time.monotonic()
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does: both processes get it
    _, err = child.communicate(timeout=PATIENCE)
    assert time.monotonic() - began < 10  # less than a second on a quiet machine
    assert child.returncode == 130
    assert err.endswith("longspan: stopped\n")
    assert learning
    assert not any(Path(f"/proc/{process}").exists() for process in learning)


def test_a_library_that_fails_is_one_line(tmp_path):
    corpus = corpus_of(tmp_path, train=b"a\n")
    with pytest.raises(UserError, match=r"^bpe could not learn -5 pieces from small: ") as caught:
        fitting.learn("bpe", corpus, ["a"], {"vocab_size": -5})
    assert "\n" not in str(caught.value)


def test_fit_bytes_is_for_learned_vocabularies():
    check_settings(TokenizerConfig(kind="bpe", vocabulary_size=300, fit_bytes=0))
    with pytest.raises(UserError, match="the word tokenizer reads all of the text: drop fit_bytes"):
        check_settings(TokenizerConfig(kind="word", fit_bytes=10))
    with pytest.raises(ValueError, match="fit_bytes must be 0"):
        TokenizerConfig(kind="bpe", fit_bytes=-1)
