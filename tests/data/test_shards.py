"""Token files in several shards, and token files far larger than memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.config import DataConfig, EvaluationConfig, TokenizerConfig
from longspan.data import LanePosition, Lanes, Segments, count_tokens, order_0_entropy, preparation, prepare
from longspan.data import token_file as token_files
from longspan.data.sharded_tokens import ShardedTokens
from longspan.data.token_file import TokenFile, shard_path
from longspan.errors import UserError
from longspan.evaluation import evaluate
from tests.abuse.workplace import RECIPE
from tests.using.tiny import tiny_model

TEXT = "".join(f"line {i}: héllo wörld\n" for i in range(500))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def both(text: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TokenFile, TokenFile]:
    """The same word tokens in one file and in shards of 100 bytes."""
    config = DataConfig(corpus=str(text), tokenizer=TokenizerConfig(kind="word"))
    whole = prepare(config)
    tokens = np.array(whole.splits["train"].tokens)
    whole.folder.rename(text.with_name("whole"))
    monkeypatch.setattr(token_files, "SHARD_BYTES", 100)
    sharded = prepare(config)
    assert sharded.fingerprint == whole.fingerprint
    one = TokenFile(text.with_name("whole") / "train.tokens", **whole.splits["train"].facts())
    np.testing.assert_array_equal(one.tokens, tokens)
    return one, sharded.splits["train"]


def test_shards_hold_the_same_tokens(both):
    one, sharded = both
    files = [path for path, _, _ in sharded._files()]
    assert [path.name for path in files[:3]] == ["train.tokens", "train.1.tokens", "train.2.tokens"]
    assert len(files) > 20
    assert all(path.stat().st_size == 100 for path in files[:-1])
    assert b"".join(path.read_bytes() for path in files) == one.path.read_bytes()
    assert (sharded.crc32, sharded.num_tokens, sharded.num_bytes) == (one.crc32, len(one), one.num_bytes)
    assert isinstance(sharded.tokens, ShardedTokens)


def test_readers_see_one_array(both):
    one, sharded = (token_file.tokens for token_file in both)
    position = LanePosition()
    lanes = [Lanes(tokens, 3, 16, jitter=True) for tokens in (one, sharded)]
    segments = [Segments(tokens, 3, 8, 32) for tokens in (one, sharded)]
    for sources in (lanes, segments):
        for _ in range(60):
            blocks = [source.next(position) for source in sources]
            np.testing.assert_array_equal(blocks[0].tokens_BT, blocks[1].tokens_BT)
            np.testing.assert_array_equal(blocks[0].targets_BT, blocks[1].targets_BT)
            position = blocks[0].position
        position = LanePosition()
    np.testing.assert_array_equal(count_tokens(one, 600), count_tokens(sharded, 600))
    assert order_0_entropy(one) == order_0_entropy(sharded)
    with pytest.raises(TypeError, match="larger than memory"):
        np.asarray(sharded)


@pytest.mark.parametrize("protocol", ["every-token", "sha-rnn"])
def test_scores_are_the_same(both, protocol, monkeypatch):
    tokenizer = preparation.load_tokenizer(both[1].path.parent / "tokenizer")
    model = tiny_model(tokenizer.vocabulary_size)
    config = EvaluationConfig(protocol=protocol, batch_size=2)
    options = {"tokenizer": tokenizer, "config": config, "block_length": 12, "device": "cpu"}
    scores = [evaluate(model, token_file, **options) for token_file in both]
    monkeypatch.setattr("longspan.evaluation.measure._CHUNK_TOKENS", 50)
    scores.append(evaluate(model, both[1], **options))
    assert scores[0] == scores[1] == scores[2]


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    start=st.none() | st.integers(-40, 40),
    stop=st.none() | st.integers(-40, 40),
)
def test_slices_are_those_of_an_array(sizes, start, stop):
    whole = np.arange(sum(sizes), dtype=np.uint16)
    sharded = ShardedTokens(np.split(whole, np.cumsum(sizes)[:-1]))
    assert (len(sharded), sharded.dtype) == (len(whole), whole.dtype)
    part = sharded[start:stop]
    np.testing.assert_array_equal(part, whole[start:stop])
    assert part.dtype == whole.dtype


def test_a_slice_of_one_shard_is_not_copied(both):
    tokens = both[1].tokens
    assert np.shares_memory(tokens[10:20], tokens[0:40])


@pytest.mark.parametrize("damage", ["flipped", "removed", "cut"])
def test_damaged_shards_are_noticed(both, text, damage):
    config = DataConfig(corpus=str(text), tokenizer=TokenizerConfig(kind="word"))
    path = shard_path(both[1].path, 7)
    good = path.read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(good[:-2] if damage == "cut" else bytes([good[0] ^ 1]) + good[1:])
    if damage == "flipped":
        with pytest.raises(UserError, match=r"train.7.tokens is damaged: delete the folder"):
            prepare(config)
        with pytest.raises(UserError, match=r"train.7.tokens is damaged: delete the folder"):
            both[1].verify()
    else:
        assert prepare(config).splits["train"] == both[1]
        assert path.read_bytes() == good


def test_what_was_just_written_is_not_read_to_be_checked(text, monkeypatch):
    monkeypatch.setattr(TokenFile, "_read_all", lambda *arguments: pytest.fail("read again"))
    prepare(DataConfig(corpus=str(text)))


CHILD = """
import sys
from longspan.cli import main
status = main(["train", "tiny.toml", "--out", "run", "--quiet"])
lines = open("/proc/self/status").read().splitlines()
print(status, *(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_twenty_gigabytes_of_tokens_train_in_less_than_one(text):
    """Five shards of 4 GiB, sparse; they are known to be whole, as after writing them."""
    small = prepare(DataConfig(corpus=str(text)))
    number, shard = 5, token_files.SHARD_BYTES
    about = json.loads((small.folder / "corpus.json").read_text())
    del about["checksum"]
    train = about["splits"]["train"]
    train |= {"num_tokens": number * shard, "crc32": 7, "shards": [[shard, 7]] * number}
    (small.folder / "corpus.json").write_text(json.dumps(about))
    large = TokenFile(small.splits["train"].path, **train, highest=(255,) * number)
    for path, _, _ in large._files():
        with path.open("wb") as file:
            file.truncate(shard)
    assert sum(path.stat().st_size for path, _, _ in large._files()) > 20e9
    large.remember()
    text.with_name("tiny.toml").write_text(RECIPE)
    # Compiling the kernels would take longer than everything else.
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=text.parent,
        capture_output=True,
        text=True,
        env=os.environ | {"CXX": "none"},
    )
    assert child.returncode == 0, child.stderr
    status, peak_kilobytes = child.stdout.split()[-2:]
    assert status == "0"
    assert int(peak_kilobytes) * 1024 < 1e9
    assert "21,474,836,480" in (text.parent / "run" / "log.txt").read_text()
