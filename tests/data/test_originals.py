"""Token for token what the original projects made of the same text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from longspan.config import TokenizerConfig
from longspan.data import Lanes, load_tokenizer
from longspan.data.corpus import SPLITS, Corpus, Form, Piece
from longspan.data.preparation import TokenizedCorpus, tokenize
from longspan.data.tokenizers.symbols import as_read
from longspan.errors import UserError
from tests.data.corpora import corpus_of

GOLDEN = Path(__file__).parent.parent / "golden" / "data_pipeline"
FORMS: dict[str, Form] = {"enwik8_like": "bytes", "text8_like": "letters", "words": "words"}
SETTINGS = {
    "adaptive_span.{}.first_seen": TokenizerConfig(kind="adaptive-span", order="first-seen"),
    "adaptive_span.{}.sorted": TokenizerConfig(kind="adaptive-span", order="frequency"),
    "sha_rnn.{}": TokenizerConfig(kind="sha-rnn"),
    "transformer_xl.{}": TokenizerConfig(kind="transformer-xl"),
}
CASES = [(case.format(folder), folder, config) for case, config in SETTINGS.items() for folder in FORMS]


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "tokens.safetensors")


def prepared(folder: str, config: TokenizerConfig) -> TokenizedCorpus:
    splits = {split: (Piece.whole(GOLDEN / folder / f"{split}.txt"),) for split in SPLITS}
    return tokenize(Corpus(folder, splits, FORMS[folder]), config)


@pytest.mark.parametrize(("case", "folder", "config"), CASES)
def test_every_token_of_every_split(case, folder, config, golden):
    corpus = prepared(folder, config)
    for split in SPLITS:
        np.testing.assert_array_equal(corpus.splits[split].tokens, golden[f"{case}.{split}"])


@pytest.mark.parametrize(("case", "folder", "config"), CASES)
def test_vocabulary_and_its_saved_form(case, folder, config):
    corpus = prepared(folder, config)
    expected = json.loads((GOLDEN / "vocabularies.json").read_text(encoding="utf-8"))[case]
    saved = load_tokenizer(corpus.folder / "tokenizer")
    for tokenizer in (corpus.tokenizer, saved):
        names = tokenizer.words if folder == "words" else tokenizer.names
        assert names == expected
        assert tokenizer.vocabulary_size == len(expected)
        assert tokenizer.kind == config.kind


@pytest.mark.parametrize(("case", "folder", "config"), CASES)
def test_lanes_lie_as_the_originals_laid_them(case, folder, config, golden):
    expected = golden[f"{case}.batchified_valid_bs3"]
    rows = expected if case.startswith("adaptive_span") else expected.T
    tokens = prepared(folder, config).splits["valid"].tokens
    lanes = Lanes(tokens, 3, rows.shape[1] - 1)
    block = lanes.next(lanes.start)
    np.testing.assert_array_equal(block.tokens_BT, rows[:, :-1])
    np.testing.assert_array_equal(block.targets_BT, rows[:, 1:])


@pytest.mark.parametrize("folder", FORMS)
def test_blocks_are_those_of_the_transformer_xl_iterator(folder, golden):
    case = f"transformer_xl.{folder}.iter_bptt7_ext2"
    lanes = Lanes(prepared(folder, SETTINGS["transformer_xl.{}"]).splits["valid"].tokens, 3, 7, at_end="stop")
    blocks, position = [], lanes.start
    while block := lanes.next(position):
        blocks.append(block)
        position = block.position
    assert len(blocks) == int(golden[f"{case}.n"])
    for name, block in (("0", blocks[0]), ("1", blocks[1]), ("last", blocks[-1])):
        targets = golden[f"{case}.{name}.y"].T
        inputs = golden[f"{case}.{name}.x"].T[:, -targets.shape[1] :]  # without the extra context
        np.testing.assert_array_equal(block.targets_BT, targets)
        np.testing.assert_array_equal(block.tokens_BT, inputs)


def test_transformer_xl_loses_newlines_but_bytes_are_counted_in_full():
    train = prepared("enwik8_like", SETTINGS["transformer_xl.{}"]).splits["train"]
    raw = (GOLDEN / "enwik8_like" / "train.txt").read_bytes()
    assert (len(train), train.num_bytes, raw.count(b"\n")) == (1000, 1071, 71)


def test_prompts_end_where_they_end():
    tokenizer = prepared("enwik8_like", SETTINGS["sha_rnn.{}"]).tokenizer
    ids = tokenizer.encode("ab\nc")
    assert [tokenizer.names[i] for i in ids] == ["97", "98", "<eos>", "99"]
    assert tokenizer.decode(ids) == "ab\nc"
    dropping = prepared("enwik8_like", SETTINGS["transformer_xl.{}"]).tokenizer
    assert dropping.decode(dropping.encode("ab\nc")) == "abc"


def test_a_byte_the_vocabulary_lacks_is_named():
    tokenizer = prepared("enwik8_like", SETTINGS["sha_rnn.{}"]).tokenizer
    with pytest.raises(UserError, match="does not have the bytes 'Q', 'z': remove them"):
        tokenizer.encode("azQ")


def test_a_held_out_word_that_train_lacks_is_an_error(tmp_path):
    corpus = corpus_of(tmp_path, train=b"a b\n", valid=b"a new word\n")
    with pytest.raises(UserError, match="does not have the words 'new', 'word'"):
        tokenize(corpus, TokenizerConfig(kind="sha-rnn"))


def test_letters_lose_blanks_at_both_ends_however_the_chunks_fall():
    text = b" \n ab  c \n d  \n "
    for size in (1, 2, 3, 100):
        chunks = [text[i : i + size] for i in range(0, len(text), size)]
        assert b"".join(as_read(chunks, letters=True, newlines=True)) == b"ab  c \n d\n"
        assert b"".join(as_read(chunks, letters=True, newlines=False)) == b"ab  c  d"
