"""Evaluation of a real model against the plainest loop, and the size of the text it scored."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.config import DataConfig, EvaluationConfig, TokenizerConfig
from longspan.data import TokenizedCorpus, prepare
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.data.tokenizers.word import WordTokenizer
from longspan.errors import UserError
from longspan.evaluation import Score, evaluate
from longspan.evaluation.by_position import by_position, in_powers_of_two
from longspan.evaluation.measure import Extent, scored_text
from longspan.evaluation.protocols import EvaluationPlan, Lane, every_token, transformer_xl
from longspan.models import LanguageModel
from tests.using.tiny import tiny_model, token_file

TEXT = bytes(np.random.default_rng(0).integers(32, 64, 131, dtype=np.uint8))


def measure(model: LanguageModel, file: Any, *, block_length: int = 8, **options: Any) -> Score:
    max_tokens = options.pop("max_tokens", None)
    progress = options.pop("progress", None)
    asked = {name: options.pop(name) for name in ("memory", "by_position") if name in options}
    return evaluate(
        model,
        file,
        tokenizer=ByteTokenizer(),
        config=EvaluationConfig(**{"batch_size": 3, **options}),
        block_length=block_length,
        max_tokens=max_tokens,
        device="cpu",
        progress=progress,
        **asked,
    )


def nll(model: LanguageModel, text: bytes) -> torch.Tensor:
    """Nats of every token but the first, read in one piece from an empty state."""
    tokens = torch.tensor([list(text)])
    with torch.no_grad():
        log_probs_BTV, _ = model.log_probs(tokens[:, :-1], model.initial_state(1))
    return -log_probs_BTV[0].double().gather(1, tokens[0, 1:, None])[:, 0]


def test_one_lane_is_one_pass_over_the_text(tmp_path: Path) -> None:
    model = tiny_model()
    score = measure(model, token_file(tmp_path, TEXT), batch_size=1)
    assert score.nats == pytest.approx(float(nll(model, TEXT).sum()), rel=1e-6)
    assert (score.tokens, score.skipped, score.bytes, score.characters) == (130, 1, 130, 130)
    assert score.batch_size == 1
    assert score.block_length == 8


@given(st.integers(2, 60), st.integers(1, 7), st.integers(1, 20))
@settings(max_examples=25, deadline=None)
def test_every_lane_is_scored_as_if_it_were_alone(
    num_tokens: int, batch_size: int, block_length: int
) -> None:
    """Any length, any lanes, any blocks: padding and neighbours change nothing."""
    model = tiny_model()

    class File:
        tokens = np.frombuffer(TEXT[:num_tokens], dtype=np.uint8)
        num_bytes = num_characters = num_words = num_tokens

        def __len__(self) -> int:
            return num_tokens

    score = measure(model, File(), batch_size=batch_size, block_length=block_length)
    lanes = every_token(num_tokens, batch_size, block_length).lanes
    alone = sum(nll(model, TEXT[lane.start : lane.start + lane.length + 1]).sum() for lane in lanes)
    assert score.nats == pytest.approx(float(alone), rel=1e-5)
    assert score.tokens == num_tokens - 1


def test_block_length_does_not_matter_to_a_block_invariant_model(tmp_path: Path) -> None:
    model, file = tiny_model(), token_file(tmp_path, TEXT)
    assert model.block_invariant
    scores = [measure(model, file, block_length=length).nats for length in (1, 7, 16, 200)]
    assert scores == pytest.approx([scores[0]] * 4, rel=1e-6)


def test_the_configuration_may_say_the_block_length(tmp_path: Path) -> None:
    file = token_file(tmp_path, TEXT)
    score = evaluate(
        tiny_model(),
        file,
        tokenizer=ByteTokenizer(),
        config=EvaluationConfig(block_length=5),
        block_length=8,
        device="cpu",
    )
    assert score.block_length == 5


def test_a_limit_scores_the_first_tokens_only(tmp_path: Path) -> None:
    model = tiny_model()
    score = measure(model, token_file(tmp_path, TEXT), batch_size=1, max_tokens=50)
    assert score.nats == pytest.approx(float(nll(model, TEXT)[:50].sum()), rel=1e-6)
    assert (score.tokens, score.bytes, score.skipped) == (50, 50, 81)
    assert "80 are beyond the limit" in score.skipped_because
    assert measure(model, token_file(tmp_path, TEXT), max_tokens=10_000).tokens == 130


def test_adaptive_span_protocol(tmp_path: Path) -> None:
    model, batch, block = tiny_model(), 3, 8
    row = len(TEXT) // batch
    rows = torch.tensor(list(TEXT))[: batch * row].view(batch, row)
    state, position, means = model.initial_state(batch), 0, []
    with torch.no_grad():
        while True:
            hidden, state = model(rows[:, position : position + block], state)
            means.append(float(model.head.nll(hidden, rows[:, position + 1 : position + block + 1]).mean()))
            position += block
            if position >= row - block:
                break
    score = measure(model, token_file(tmp_path, TEXT), protocol="adaptive-span")
    assert score.loss == pytest.approx(sum(means) / len(means), rel=1e-6)
    assert score.tokens == len(means) * batch * block
    assert score.skipped == len(TEXT) - score.tokens


@pytest.mark.parametrize("protocol", ["transformer-xl", "sha-rnn"])
def test_column_protocols(tmp_path: Path, protocol: str) -> None:
    model, batch, block = tiny_model(), 3, 8
    n = len(TEXT) // batch
    columns = torch.tensor(list(TEXT))[: batch * n].view(batch, n).t()
    state, total, lengths = model.initial_state(batch), 0.0, 0
    with torch.no_grad():
        for i in range(0, n - 1, block):
            length = min(block, n - 1 - i)
            hidden, state = model(columns[i : i + length].t(), state)
            total += length * float(model.head.nll(hidden, columns[i + 1 : i + 1 + length].t()).mean())
            lengths += length
    score = measure(model, token_file(tmp_path, TEXT), protocol=protocol)
    assert score.loss == pytest.approx(total / (n if protocol == "sha-rnn" else lengths), rel=1e-6)


@pytest.mark.parametrize("length", [131, 128, 97])
def test_fairseq_protocol(tmp_path: Path, length: int) -> None:
    """Blocks first, then rows of blocks; padded targets inside each block; state carried along a row."""
    model, batch, block, pad = tiny_model(), 3, 8, -1
    blocks = torch.tensor(list(TEXT[:length])).split(block)
    row = len(blocks) // batch
    state, total, counted = model.initial_state(batch), 0.0, 0
    with torch.no_grad():
        for i in range(row):
            column = [blocks[b * row + i] for b in range(batch)]
            x = torch.nn.utils.rnn.pad_sequence(column, batch_first=True, padding_value=pad)
            y = torch.nn.functional.pad(x[:, 1:], (0, 1), value=pad)
            hidden, state = model(x.clamp(min=0), state)
            nll_BT = model.head.nll(hidden, y.clamp(min=0)).double()
            total += float(nll_BT[y != pad].sum())
            counted += int((y != pad).sum())
    score = measure(model, token_file(tmp_path, TEXT[:length]), protocol="fairseq")
    assert score.nats == pytest.approx(total, rel=1e-6)
    assert (score.tokens, score.divisor, score.bytes) == (counted, counted, counted)
    assert score.skipped == length - counted


def test_without_memory_every_block_is_alone(tmp_path: Path) -> None:
    model, file = tiny_model(), token_file(tmp_path, TEXT)
    score = measure(model, file, batch_size=1, memory=False)
    alone = sum(float(nll(model, TEXT[i : i + 9]).sum()) for i in range(0, 130, 8))
    assert score.nats == pytest.approx(alone, rel=1e-6)
    assert not score.memory
    assert score.tokens == 130
    assert abs(score.nats - measure(model, file, batch_size=1).nats) > 1e-3


@pytest.mark.parametrize(
    ("protocol", "block_length"),
    [("every-token", 1), ("every-token", 8), ("every-token", 200), ("fairseq", 8), ("sha-rnn", 8)],
)
def test_positions_sum_to_the_score(tmp_path: Path, protocol: str, block_length: int) -> None:
    model, file = tiny_model(), token_file(tmp_path, TEXT)
    plain = measure(model, file, protocol=protocol, block_length=block_length)
    score = measure(model, file, protocol=protocol, block_length=block_length, by_position=True)
    assert plain.by_position is None
    assert score.by_position is not None
    for parts in (score.by_position, in_powers_of_two(score.by_position)):
        assert sum(part.nats for part in parts) == math.fsum(part.nats for part in parts) == score.nats
        assert sum(part.tokens for part in parts) == score.tokens == plain.tokens
    assert score.nats == pytest.approx(plain.nats, rel=1e-14)
    assert all(part.last <= block_length - (protocol == "fairseq") for part in score.by_position)


def test_a_position_is_that_of_the_token_read(tmp_path: Path) -> None:
    model = tiny_model()
    score = measure(model, token_file(tmp_path, TEXT), batch_size=1, by_position=True)
    nats = nll(model, TEXT)
    assert score.by_position is not None
    assert [part.tokens for part in score.by_position] == [17, 17, *[16] * 6]
    for part in score.by_position:
        assert part.nats == pytest.approx(float(nats[part.first - 1 :: 8].sum()), rel=1e-5)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=70), st.randoms())
@settings(max_examples=100, deadline=None)
def test_the_arithmetic_of_positions(nats: list[float], order: Any) -> None:
    """Any order and any grouping has the same sum, and the sums are those that went in."""
    parts = list(by_position(nats, [2] * len(nats)))
    total = sum(part.nats for part in parts)
    assert total == pytest.approx(math.fsum(nats), rel=1e-12)
    rows = in_powers_of_two(parts)
    assert sum(row.nats for row in rows) == total
    assert len(rows) == 1 + (len(nats) - 1).bit_length()
    assert [row.first for row in rows[1:]] == [row.last + 1 for row in rows[:-1]]
    order.shuffle(parts)
    assert sum(part.nats for part in parts) == total


def test_the_smallest_total_is_kept() -> None:
    assert [part.nats for part in by_position([5e-324], [1])] == [5e-324]


def test_rows_of_positions_by_hand() -> None:
    parts = by_position([8.0, 3.0, 2.0, 4.0, 0.0, 5.0], [2, 2, 1, 1, 0, 1])
    found = [(row.first, row.last, row.tokens, row.nats) for row in in_powers_of_two(parts)]
    assert found == [(1, 1, 2, 8.0), (2, 2, 2, 3.0), (3, 4, 2, 6.0), (6, 6, 1, 5.0)]
    assert parts[0].loss == 4.0
    assert math.isnan(by_position([math.nan], [1])[0].nats)


def test_dropout_is_off_inside_and_every_mode_comes_back(tmp_path: Path) -> None:
    model, file = tiny_model(), token_file(tmp_path, TEXT)
    expected = measure(model, file).nats
    model.dropout = 0.5
    model.train()
    model.head.eval()
    assert measure(model, file).nats == expected
    assert model.training
    assert not model.head.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_progress_counts_up_to_the_last_token(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    measure(tiny_model(), token_file(tmp_path, TEXT), progress=lambda *told: seen.append(told))
    assert seen[-1] == (130, 130)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too few to score"):
        measure(tiny_model(), token_file(tmp_path, b"x"))


# "ä" has two bytes, "€" three, the snake four
UNICODE = "aä€🐍\n" * 7


@pytest.mark.parametrize("max_tokens", [3, 10, 13, 20, 50, 76])
def test_bytes_and_characters_are_those_of_the_scored_tokens(tmp_path: Path, max_tokens: int) -> None:
    """The first token, `a`, is never scored; a character counts where it begins."""
    data = UNICODE.encode()
    file = token_file(tmp_path, data)
    scored = data[1 : 1 + max_tokens]
    plan = every_token(min(len(data), max_tokens + 1), 1, 8)
    characters = sum(byte & 0xC0 != 0x80 for byte in scored)
    text = scored_text(file, ByteTokenizer(), plan)
    assert (text.bytes, text.characters) == (len(scored), characters)


GERMAN = "".join(f"der  Käse {n % 90} kostet {n % 7} €\nund 🐍 NICHTS\n" for n in range(300))


def prepared(folder: Path, kind: Any, *, lowercase: bool = False) -> TokenizedCorpus:
    path = folder / "text.txt"
    path.write_text(GERMAN)
    size = {"sentencepiece": 300, "bpe": 300, "word": 40}.get(kind)
    tokenizer = TokenizerConfig(kind=kind, vocabulary_size=size, lowercase=lowercase)
    return prepare(DataConfig(corpus=str(path), tokenizer=tokenizer))


@pytest.mark.parametrize("kind", ["character", "sentencepiece", "bpe"])
def test_text_that_comes_back_whole_is_measured_exactly(tmp_path: Path, kind: Any) -> None:
    corpus = prepared(tmp_path, kind)
    file, decode = corpus.splits["test"], corpus.tokenizer.decode
    first = decode(file.tokens[:1])
    for num_tokens in (2, len(file) // 3, len(file) - 5, len(file)):
        text = decode(file.tokens[:num_tokens])
        found = scored_text(file, corpus.tokenizer, every_token(num_tokens, 3, 8))
        assert found.bytes == len(text.encode()) - len(first.encode())
        assert found.characters == len(text) - len(first)
        blanks, all_blanks = (len(part) - len("".join(part.split())) for part in (text, decode(file.tokens)))
        assert found.words == round(file.num_words * blanks / all_blanks)


@pytest.mark.parametrize(("kind", "lowercase"), [("word", False), ("byte", True), ("transformer-xl", False)])
def test_a_part_of_what_a_tokenizer_loses_is_measured_like_the_whole(
    tmp_path: Path, kind: Any, lowercase: bool
) -> None:
    """Case, double blanks, rare words: parts add up to the raw text, with no jump from few tokens to many."""
    corpus = prepared(tmp_path, kind, lowercase=lowercase)
    file = corpus.splits["train"]
    parts = [Lane(start, min(50, len(file) - 1 - start)) for start in range(-1, len(file) - 1, 50)]
    found = [scored_text(file, corpus.tokenizer, EvaluationPlan((part,), 1, "")) for part in parts]
    whole = scored_text(file, corpus.tokenizer, EvaluationPlan((Lane(-1, len(file)),), 1, ""))
    assert whole == Extent(file.num_bytes, file.num_characters, file.num_words)
    assert sum(part.bytes for part in found) == pytest.approx(whole.bytes, abs=len(parts) / 2)
    assert sum(part.characters for part in found) == pytest.approx(whole.characters, abs=len(parts) / 2)
    few, many = (len(file) // 2 - 4, len(file) // 2 + 6)
    less, more = (scored_text(file, corpus.tokenizer, every_token(n, 1, 8)).bytes for n in (few, many))
    assert 5 <= more - less <= 100


def test_a_perplexity_per_word_is_that_of_a_model_of_words(tmp_path: Path) -> None:
    corpus = prepared(tmp_path, "word")
    model, file = tiny_model(corpus.tokenizer.vocabulary_size), corpus.splits["test"]
    assert file.num_words == len(file)
    score = evaluate(
        model,
        file,
        tokenizer=corpus.tokenizer,
        config=EvaluationConfig(),
        block_length=8,
        device="cpu",
    )
    assert score.words == score.tokens
    assert score.perplexity_per_word == pytest.approx(score.perplexity)


def test_words_of_a_part_that_is_not_like_the_rest(tmp_path: Path) -> None:
    """Short words before long ones."""
    tokenizer = WordTokenizer(["<eos>", "a", "longer-than-that", "<unk>"])
    file = token_file(tmp_path, b"a a a\n" * 50 + b"longer-than-that longer-than-that\n" * 50, tokenizer)
    for num_tokens in (30, 200, 250, 350):
        assert scored_text(file, tokenizer, every_token(num_tokens, 2, 8)).words == num_tokens - 1


def test_a_text_without_blanks_has_words_by_its_bytes(tmp_path: Path) -> None:
    file = token_file(tmp_path, b"x" * 80)
    assert scored_text(file, ByteTokenizer(), every_token(40, 2, 8)).words == round(file.num_words * 39 / 80)


@pytest.mark.parametrize("max_tokens", [None, 4])
def test_unknown_words_are_counted_where_they_are_scored(tmp_path: Path, max_tokens: int | None) -> None:
    """The first token is never scored, unknown or not."""
    tokenizer = WordTokenizer(["<eos>", "a", "b", "<unk>"])
    file = token_file(tmp_path, b"c a d b\nd d a\n", tokenizer)
    score = evaluate(
        tiny_model(tokenizer.vocabulary_size),
        file,
        tokenizer=tokenizer,
        config=EvaluationConfig(batch_size=2),
        block_length=3,
        max_tokens=max_tokens,
        device="cpu",
    )
    assert (score.tokens, score.unknown) == ((8, 3) if max_tokens is None else (4, 1))
    assert measure(tiny_model(), token_file(tmp_path, b"<unk> <unk>")).unknown == 0


def test_bytes_skipped_between_rows_are_not_counted(tmp_path: Path) -> None:
    data = UNICODE.encode()
    plan = transformer_xl(len(data), 4, 8)
    scored = [data[lane.start + 1 + i] for lane in plan.lanes for i in range(lane.length)]
    text = scored_text(token_file(tmp_path, data), ByteTokenizer(), plan)
    assert text.bytes == len(scored) == len(data) - 4 - len(data) % 4


def test_bytes_that_begin_no_character(tmp_path: Path) -> None:
    score = measure(tiny_model(), token_file(tmp_path, b"\x80" * 20))
    assert (score.bytes, score.characters, score.bits_per_character) == (19, 0, math.inf)
