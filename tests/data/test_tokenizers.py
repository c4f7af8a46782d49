from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longspan.config import TokenizerConfig
from longspan.data import Tokenizer, load_tokenizer
from longspan.data.corpus import SPLITS
from longspan.data.text import decoded
from longspan.data.tokenizers import check_settings, fit_tokenizer
from longspan.errors import UserError
from tests.data.corpora import corpus_of

TEXT = "The cat sat on the mat.\n\nThe dog, too — a café in Köln: 東京 🙂!\n  indented = 1\n" * 8
TEXT_IN_WORDS = TEXT.replace("\n", " \n ").split(" ")
CONFIGS = {
    "byte": TokenizerConfig(),
    "character": TokenizerConfig(kind="character"),
    "word": TokenizerConfig(kind="word"),
    "sentencepiece": TokenizerConfig(kind="sentencepiece", vocabulary_size=310),
    "bpe": TokenizerConfig(kind="bpe", vocabulary_size=300),
    "sha-rnn": TokenizerConfig(kind="sha-rnn"),
}
says_everything = pytest.mark.parametrize("kind", ["byte", "sentencepiece", "bpe"])
every_kind = pytest.mark.parametrize("kind", CONFIGS)


@lru_cache
def fitted(kind: str, **changes: object) -> Tokenizer:
    config = TokenizerConfig(**{**vars(CONFIGS[kind]), **changes})
    with TemporaryDirectory() as folder:
        form = "bytes" if kind == "sha-rnn" else "words"
        return fit_tokenizer(config, corpus_of(Path(folder), form, train=TEXT.encode()))


def streamed(tokenizer: Tokenizer, ids) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(int(i)) for i in ids), stream.flush()]


@every_kind
def test_text_comes_back(kind):
    tokenizer = fitted(kind)
    single_blanks = "\n".join(" ".join(line.split()) for line in TEXT.split("\n"))
    expected = single_blanks if kind == "word" else TEXT
    assert tokenizer.decode(tokenizer.encode(TEXT)) == expected
    assert "".join(streamed(tokenizer, tokenizer.encode(TEXT))) == expected


@every_kind
def test_ids_fit_the_vocabulary(kind):
    tokenizer = fitted(kind)
    ids = tokenizer.encode(TEXT)
    assert 0 <= ids.min() <= ids.max() < tokenizer.vocabulary_size


@every_kind
def test_empty_text_has_no_tokens(kind):
    tokenizer = fitted(kind)
    assert tokenizer.encode("").shape == (0,)
    assert tokenizer.decode([]) == ""


@every_kind
@pytest.mark.parametrize("size", [1, 3, 7, 64, 10_000])
def test_a_split_is_the_same_however_its_chunks_fall(kind, size):
    tokenizer = fitted(kind)
    raw = TEXT.encode()
    chunks = [raw[i : i + size] for i in range(0, len(raw), size)]
    np.testing.assert_array_equal(
        np.concatenate(list(tokenizer.encode_split(chunks))), tokenizer.encode(TEXT)
    )


@every_kind
def test_saved_and_loaded_it_is_the_same(kind, tmp_path):
    tokenizer = fitted(kind)
    tokenizer.save(tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert (loaded.kind, loaded.vocabulary_size) == (kind, tokenizer.vocabulary_size)
    np.testing.assert_array_equal(loaded.encode(TEXT), tokenizer.encode(TEXT))
    assert loaded.decode(loaded.encode(TEXT)) == tokenizer.decode(tokenizer.encode(TEXT))


@says_everything
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=30))
@example(text="\r\n\t \x00 \u2028<unk> <0x41>\n\n")
def test_no_text_is_lost(kind, text):
    tokenizer = fitted(kind)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 255), max_size=40))
def test_a_stream_of_bytes_says_what_decoding_all_at_once_does(ids):
    tokenizer = fitted("byte")
    expected = bytes(ids).decode("utf-8", "replace")
    assert tokenizer.decode(ids) == expected
    assert "".join(streamed(tokenizer, ids)) == expected


def test_a_stream_waits_for_the_rest_of_a_character():
    assert streamed(fitted("byte"), "a€b".encode()) == ["a", "", "", "€", "b", ""]
    assert streamed(fitted("byte"), "a€".encode()[:3]) == ["a", "", "", "\ufffd"]


def test_a_stream_of_words_puts_blanks_between_and_breaks_lines():
    tokenizer = fitted("word")
    assert streamed(tokenizer, tokenizer.encode("The cat\nsat")) == ["The", " cat", "\n", "sat", ""]


def test_words_in_both_orders(tmp_path):
    corpus = corpus_of(tmp_path, train=b"b a c\na c\n\nc a")
    frequent = fit_tokenizer(TokenizerConfig(kind="word"), corpus)
    assert frequent.words == ["<eos>", "a", "c", "b", "<unk>"]  # 4, then ties as first seen
    assert fit_tokenizer(TokenizerConfig(kind="word", order="first-seen"), corpus).words == [
        "b",
        "a",
        "c",
        "<eos>",
        "<unk>",
    ]
    train = np.concatenate(list(frequent.encode_split(corpus.read("train"))))
    assert train.tolist() == [3, 1, 2, 0, 1, 2, 0, 0, 2, 1, 0]  # the last line ends too


def test_a_cut_vocabulary_keeps_the_most_frequent_and_counts_the_rest_as_unknown(tmp_path):
    corpus = corpus_of(tmp_path, train=b"a a a a b b c d e f\n")
    tokenizer = fit_tokenizer(TokenizerConfig(kind="word", vocabulary_size=4), corpus)
    assert tokenizer.words == ["a", "<unk>", "b", "<eos>"]  # 4 of a, 4 cut words, 2 of b
    assert tokenizer.decode(tokenizer.encode("a c b nobody")) == "a <unk> b <unk>"


def test_unk_of_the_text_itself_is_the_unknown_word(tmp_path):
    tokenizer = fit_tokenizer(TokenizerConfig(kind="word"), corpus_of(tmp_path, train=b"<unk> a <unk>\n"))
    assert tokenizer.words == ["<unk>", "a", "<eos>"]


@pytest.mark.parametrize("kind", ["byte", "character", "word", "sentencepiece", "bpe"])
def test_lower_case_applies_to_corpus_and_prompt(kind):
    tokenizer = fitted(kind, lowercase=True)
    assert tokenizer.decode(tokenizer.encode("THE CAT")) == "the cat"
    upper, lower = (
        [*tokenizer.encode_split([text])] for text in ("THE KÖLN\n".encode(), "the köln\n".encode())
    )
    np.testing.assert_array_equal(np.concatenate(upper), np.concatenate(lower))


@pytest.mark.parametrize("kind", ["byte", "character", "word", "sentencepiece", "bpe"])
def test_lower_case_does_not_depend_on_chunks(kind, tmp_path):
    """A sigma at the end of a word has a lower case of its own."""
    text = "ΟΔΟΣ ΣΑΣΑΣ ΣΟΣ\n".encode()
    corpus = corpus_of(tmp_path, train=text + TEXT.encode(), valid=text, test=text)
    config = TokenizerConfig(**{**vars(CONFIGS[kind]), "lowercase": True})
    tokenizer = fit_tokenizer(config, corpus)
    for size in (1, 5, 8):
        chunks = [text[i : i + size] for i in range(0, len(text), size)]
        ids = np.concatenate(list(tokenizer.encode_split(chunks)))
        assert tokenizer.decode(ids) == "οδος σασας σος\n"
        assert "".join(decoded(chunks, lowercase=True)) == "οδος σασας σος\n"


@every_kind
def test_the_pieces_of_a_text_are_the_text(kind):
    tokenizer = fitted(kind)
    assert len(tokenizer.pieces()) == tokenizer.vocabulary_size
    said = b"".join(tokenizer.pieces()[token] for token in tokenizer.encode(TEXT)).decode()
    if kind == "word":  # every word has its blank, even at the end of a line
        assert said == "".join(f"{word} " if word != "\n" else word for word in TEXT_IN_WORDS if word)
    else:
        assert said == TEXT


def test_the_alphabet_has_what_only_held_out_text_has(tmp_path):
    corpus = corpus_of(tmp_path, train=b"aab", valid=b"xb", test=b"ya")
    assert fit_tokenizer(TokenizerConfig(kind="character"), corpus).characters == "abxy"


@pytest.mark.parametrize(
    ("kind", "expected"), [("character", [4, 2, 3, 1, 3, 0, 4]), ("adaptive-span", [3, 1, 0, 2, 0])]
)
def test_symbols_in_sorted_order(tmp_path, kind, expected):
    corpus = corpus_of(tmp_path, train=b"cab b\nc")
    tokenizer = fit_tokenizer(TokenizerConfig(kind=kind, order="sorted"), corpus)
    ids = np.concatenate(list(tokenizer.encode_split(corpus.read("train"))))
    assert ids.tolist() == expected


def test_a_cut_inside_a_character_breaks_no_alphabet(tmp_path):
    """As enwik8 is cut, at a byte: what is left of the character in each split is a symbol of its own."""
    corpus = corpus_of(tmp_path, train="aé".encode()[:-1], valid="é".encode()[1:] + b"b", test=b"c")
    tokenizer = fit_tokenizer(TokenizerConfig(kind="character", order="first-seen"), corpus)
    assert tokenizer.characters == "a\udcc3\udca9bc"
    ids = [np.concatenate(list(tokenizer.encode_split(corpus.read(split)))).tolist() for split in SPLITS]
    assert ids == [[0, 1], [2, 3], [4]]


def test_characters_that_are_not_utf8_survive(tmp_path):
    corpus = corpus_of(tmp_path, train=b"caf\xe9 \xff\n")
    tokenizer = fit_tokenizer(TokenizerConfig(kind="character", order="first-seen"), corpus)
    ids = np.concatenate(list(tokenizer.encode_split(corpus.read("train"))))
    assert ids.tolist() == list(range(7))
    assert tokenizer.decode(ids) == "caf\ufffd \ufffd\n"
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").characters == tokenizer.characters


def test_characters_the_vocabulary_lacks_are_named():
    with pytest.raises(UserError, match=r"^the vocabulary does not have the characters 'Z', 'ß': ") as caught:
        fitted("character").encode("Zaß")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TokenizerConfig(kind="bpe"), "needs a vocabulary_size"),
        (TokenizerConfig(kind="sentencepiece"), "needs a vocabulary_size"),
        (TokenizerConfig(vocabulary_size=100), "drop vocabulary_size"),
        (TokenizerConfig(kind="word", vocabulary_size=2), "at least 3"),
        (TokenizerConfig(kind="bpe", vocabulary_size=100), "at least 256"),
        (TokenizerConfig(kind="sha-rnn", lowercase=True), "drop lowercase"),
        (TokenizerConfig(order="first-seen"), "the byte tokenizer has a fixed order"),
        (TokenizerConfig(kind="bpe", vocabulary_size=300, order="first-seen"), "drop order"),
        (TokenizerConfig(kind="transformer-xl", order="first-seen"), "drop order"),
    ],
)
def test_options_that_make_no_sense_together(config, message):
    with pytest.raises(UserError, match=message):
        check_settings(config)


@pytest.mark.parametrize("kind", ["character", "word", "adaptive-span"])
def test_tokenizers_that_have_an_order_take_one(kind):
    check_settings(TokenizerConfig(kind=kind, order="first-seen"))


def test_too_few_pieces_for_sentencepiece_is_one_line(tmp_path):
    with pytest.raises(UserError, match="sentencepiece could not learn 260 pieces") as caught:
        fit_tokenizer(
            TokenizerConfig(kind="sentencepiece", vocabulary_size=260),
            corpus_of(tmp_path, train=TEXT.encode()),
        )
    assert "\n" not in str(caught.value)
    reason = str(caught.value).partition(": ")[2]
    assert reason.startswith("Vocabulary size is smaller than required_chars. 260 vs ")


def test_sentencepiece_that_gives_no_reason_but_its_source_is_one_line_too(tmp_path):
    with pytest.raises(UserError, match=r"could not learn 300 pieces from .*: no reason given$"):
        fit_tokenizer(
            TokenizerConfig(kind="sentencepiece", vocabulary_size=300), corpus_of(tmp_path, train=b"\n\n")
        )


def test_a_damaged_or_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer in .*tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    fitted("sentencepiece").save(tmp_path)
    (tmp_path / "sentencepiece.model").write_bytes(b"garbage")
    with pytest.raises(UserError, match="is damaged"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"form": "nothing we know"}))
    with pytest.raises(UserError, match="is damaged"):
        load_tokenizer(tmp_path)


def test_nothing_saved_is_a_pickle(tmp_path):
    for kind in CONFIGS:
        fitted(kind).save(tmp_path / kind)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"tokenizer.json", "sentencepiece.model", "bpe.json"}


def test_numbers_are_the_tokens(tmp_path):
    corpus = corpus_of(tmp_path, "words", train=b"3 1 4\n15 0\n")
    tokenizer = fit_tokenizer(TokenizerConfig(kind="number"), corpus)
    assert tokenizer.vocabulary_size == 16
    assert tokenizer.encode(" 15\n0 007 ").tolist() == [15, 0, 7]
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.decode([15, 0]) == "15 0"
    assert np.concatenate(list(tokenizer.encode_split([b"1", b"5 3\n", b"4"]))).tolist() == [15, 3, 4]
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").vocabulary_size == 16
    assert fit_tokenizer(TokenizerConfig(kind="number", vocabulary_size=99), corpus).vocabulary_size == 99


@pytest.mark.parametrize("text", ["1 two", "-1", "1.5", "٣", "9" * 5000, "16"])
def test_what_is_no_number_of_a_token(tmp_path, text):
    corpus = corpus_of(tmp_path, "words", train=b"15")
    with pytest.raises(UserError) as caught:
        fit_tokenizer(TokenizerConfig(kind="number"), corpus).encode(text)
    assert len(str(caught.value)) < 120


def test_frequent_pieces_come_first_and_bytes_last(tmp_path):
    """An adaptive softmax cuts the vocabulary by number: the first cluster must be what is frequent."""
    text = ("the cat sat on the mat and the dog sat on the log\n" * 40).encode()
    tokenizer = fit_tokenizer(
        TokenizerConfig(kind="sentencepiece", vocabulary_size=300), corpus_of(tmp_path, train=text)
    )
    spare = 256 + 1  # the bytes, and the piece that is never used
    words = tokenizer.vocabulary_size - spare
    ids = tokenizer.encode(text.decode())
    assert ids.max() < words
    assert tokenizer.decode(ids) == text.decode()
    assert sorted(tokenizer.pieces()[-256:]) == [bytes([byte]) for byte in range(256)]
    assert tokenizer.encode("\u0416").tolist() == [
        tokenizer.vocabulary_size - 256 + byte for byte in (0xD0, 0x96)
    ]


def test_sentencepiece_as_it_is_by_default(tmp_path):
    """What SentencePiece itself says of the lines, one after another; what it cannot say is token 0."""
    text = "The Cat sat.\n\n  a  cat\tSAT on the <unk> mat \n" * 40 + "rare: \u01c5 \ufb01\n"
    settings = TokenizerConfig(kind="sentencepiece-default", vocabulary_size=40, lowercase=True)
    tokenizer = fit_tokenizer(settings, corpus_of(tmp_path, train=text.encode()))
    ids = tokenizer.encode("a CAT  sat\n\non \u4e00\n")
    pieces = [tokenizer.pieces()[token].decode() for token in ids]
    assert "".join(pieces) == " a cat sat on <unk>"
    assert tokenizer.unknown_id == 0
    assert list(ids).count(0) == 1
    tokenizer.save(tmp_path)
    assert np.array_equal(load_tokenizer(tmp_path).encode("a cat"), tokenizer.encode("a cat"))
