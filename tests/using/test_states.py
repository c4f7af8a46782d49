"""A loaded model reads, scores and goes on: states in, states out."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import longspan
from longspan import LoadedModel, reading
from longspan.config import RunConfig
from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.data.tokenizers.character import CharacterTokenizer
from longspan.data.tokenizers.number import NumberTokenizer
from longspan.data.tokenizers.word import WordTokenizer
from longspan.errors import UserError
from longspan.reading import TextState
from longspan.state import State
from tests.models.test_contract import VARIANTS
from tests.models.test_contract import make as make_model
from tests.using.tiny import run_folder, tiny_model

TEXT = "def main(argv):\n    return 0 if argv else 1\n"
LETTERS = "abcdefghijk"
# One of each kind of memory, and one whose outputs depend on how a text is cut.
KINDS = ["adaptive-span", "all-attention", "sha-rnn", "transformer-xl", "gpt", "modern, n-grams"]


@pytest.fixture
def lm(tmp_path: Path) -> LoadedModel:
    return longspan.load(run_folder(tmp_path / "run").path)


def of_letters(variant: str) -> LoadedModel:
    return LoadedModel(
        make_model(variant).float(), CharacterTokenizer(LETTERS), RunConfig(), torch.device("cpu"), Path()
    )


def assert_same(one: TextState, other: TextState, rtol: float = 0.0, atol: float = 0.0) -> None:
    assert (one.tail, one.tokens) == (other.tail, other.tokens)
    torch.testing.assert_close(one.hidden_D, other.hidden_D, rtol=rtol, atol=atol)
    torch.testing.assert_close(one.state.flatten(), other.state.flatten(), rtol=rtol, atol=atol)


class TestScore:
    def test_each_token_costs_what_the_model_says(self, lm: LoadedModel) -> None:
        score = lm.score(TEXT)
        ids = list(TEXT.encode())
        assert score.ids == tuple(ids)
        assert b"".join(score.pieces) == TEXT.encode()
        assert score.bytes == len(TEXT)
        tokens = torch.tensor([[ord("\n"), *ids]])  # without a state it is the beginning of a line
        with torch.no_grad():
            log_probs, _ = lm.model.log_probs(tokens[:, :-1], lm.model.initial_state(1))
        expected = -log_probs[0].gather(1, tokens[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(score.token_nats), expected, rtol=1e-5, atol=1e-5)
        assert score.nats == pytest.approx(float(expected.double().sum()), rel=1e-6)
        assert score.bits_per_byte == pytest.approx(score.nats / math.log(2) / len(TEXT))

    def test_blocks_change_nothing(self, lm: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = lm.score(TEXT)
        monkeypatch.setattr(reading, "READ_BLOCK", 5)
        cut = lm.score(TEXT)
        assert cut.token_nats == pytest.approx(whole.token_nats, rel=1e-4)
        assert_same(cut.state, whole.state, rtol=1e-4, atol=1e-4)

    def test_parts_add_up(self, lm: LoadedModel) -> None:
        first = lm.score(TEXT[:11])
        second = lm.score(TEXT[11:], first.state)
        assert first.token_nats + second.token_nats == pytest.approx(lm.score(TEXT).token_nats, rel=1e-4)
        assert second.state.tokens == len(TEXT) + 1

    def test_what_was_read_before_counts(self, lm: LoadedModel) -> None:
        assert lm.score("x", lm.read("abc")).nats != lm.score("x", lm.read("abd")).nats

    def test_the_bytes_of_other_tokenizers(self, tmp_path: Path) -> None:
        words = WordTokenizer(["<eos>", "a", "b", "<unk>"])
        score = longspan.load(run_folder(tmp_path / "run", words).path).score("a b a")
        assert len(score.ids) == len(score.token_nats) == 3
        assert score.bytes == 5

    def test_no_text(self, lm: LoadedModel) -> None:
        score = lm.score("")
        assert (score.ids, score.nats, score.bytes) == ((), 0.0, 0)
        assert math.isnan(score.bits_per_byte)


class TestRead:
    def test_a_state_is_that_of_the_model(self, lm: LoadedModel) -> None:
        state = lm.read(TEXT)
        ids = torch.tensor([list(TEXT.encode())])
        with torch.no_grad():
            hidden, expected = lm.model(ids, lm.model.initial_state(1))
        assert isinstance(state.state, State)
        torch.testing.assert_close(state.state.flatten(), expected.flatten())
        torch.testing.assert_close(state.hidden_D, hidden[0, -1])
        assert state.tokens == len(TEXT)

    def test_pieces_and_empty_texts(self, lm: LoadedModel) -> None:
        assert_same(lm.read(["", TEXT[:9], "", TEXT[9:]]), lm.read(TEXT[9:], lm.read(TEXT[:9])))
        state = lm.read(TEXT)
        assert lm.read("", state) is state
        assert_same(lm.read(""), lm.read("\n"))

    def test_memory_does_not_grow_with_the_text(self, lm: LoadedModel) -> None:
        read: list[int] = []
        lm.model.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].shape[1]))
        sizes = {
            sum(leaf.numel() for leaf in lm.read("some text " * times).state.flatten().values())
            for times in (10, 300)
        }
        assert len(sizes) == 1
        assert max(read) == reading.READ_BLOCK

    def test_going_on_does_not_change_a_state(self, lm: LoadedModel) -> None:
        state = lm.read(TEXT)
        before = {name: leaf.clone() for name, leaf in state.state.flatten().items()}
        lm.generate(tokens=20, state=state)
        lm.score("more", state)
        torch.testing.assert_close(state.state.flatten(), before, rtol=0, atol=0)


class TestGenerate:
    def test_it_is_a_string(self, lm: LoadedModel) -> None:
        text = lm.generate("a", tokens=10, seed=1)
        assert isinstance(text, str)
        assert text == "".join(lm.stream("a", tokens=10, seed=1))
        assert ("b" + text)[1:] == text

    @pytest.mark.parametrize("variant", KINDS)
    def test_a_prompt_may_be_read_before(self, variant: str) -> None:
        lm = of_letters(variant)
        expected = lm.generate("abcade", tokens=12, seed=3)
        assert lm.generate(tokens=12, seed=3, state=lm.read("abcade")) == expected
        assert lm.generate("de", tokens=12, seed=3, state=lm.read("abca"))  # cut elsewhere: any text

    @pytest.mark.parametrize("variant", KINDS)
    def test_a_text_goes_on_where_it_ended(self, variant: str) -> None:
        lm = of_letters(variant)
        whole = lm.generate("abc", tokens=24, temperature=0)
        first = lm.generate("abc", tokens=11, temperature=0)
        second = lm.generate(tokens=13, temperature=0, state=first.state)
        assert first + second == whole
        assert first.state.tokens == 3 + 11

    def test_one_state_has_many_continuations(self, lm: LoadedModel) -> None:
        state = lm.read(TEXT)
        texts = [lm.generate(tokens=15, seed=seed, state=state) for seed in (1, 2, 1)]
        assert texts[0] == texts[2] != texts[1]

    def test_text_and_state_fit_together(self, tmp_path: Path) -> None:
        """The blank between the last word that was read and the first new one belongs to the new text."""
        words = WordTokenizer(["<eos>", "a", "b", "<unk>"])
        lm = longspan.load(run_folder(tmp_path / "words", words).path)
        assert lm.generate(tokens=6, seed=0, state=lm.read("b a")) == lm.generate("b a", tokens=6, seed=0)
        halves = longspan.load(run_folder(tmp_path / "bytes").path)
        state = reading.begin(
            halves.model, list("a€".encode())[:-1]
        )  # a character whose last byte is missing
        text = halves.tokenizer.stream()
        for token in state.tail:
            text.push(token)
        assert text.push("€".encode()[-1]) == "€"


class TestHidden:
    def test_one_row_for_each_token(self, lm: LoadedModel) -> None:
        hidden_TD = lm.hidden(TEXT)
        with torch.no_grad():
            expected, _ = lm.model(torch.tensor([list(TEXT.encode())]), lm.model.initial_state(1))
        torch.testing.assert_close(hidden_TD, expected[0])
        torch.testing.assert_close(
            lm.hidden(TEXT[9:], lm.read(TEXT[:9])), hidden_TD[9:], rtol=1e-4, atol=1e-4
        )
        assert lm.hidden("").shape == (0, hidden_TD.shape[1])
        assert not hidden_TD.requires_grad


class TestSpans:
    def test_of_every_layer_and_head(self, lm: LoadedModel) -> None:
        assert lm.spans() == [[10.0, 10.0], [10.0, 10.0]]  # half the limit of 12, and the ramp
        assert lm.spans() == tiny_model().diagnostics()["spans_LH"].tolist()

    @pytest.mark.parametrize(
        "variant", ["gpt, no spans", "transformer-xl", "sha-rnn", "adaptive-span, fixed"]
    )
    def test_none_where_nothing_is_learned(self, variant: str) -> None:
        assert of_letters(variant).spans() is None

    @pytest.mark.parametrize("variant", sorted(VARIANTS))
    def test_every_model_scores_and_reads(self, variant: str) -> None:
        lm = of_letters(variant)
        score = lm.score("abcdefghijkabc")
        assert len(score.token_nats) == 14
        assert all(nats > 0 for nats in score.token_nats)
        assert lm.tokenizer.vocabulary_size == len(LETTERS) != ByteTokenizer().vocabulary_size


class TestMistakes:
    @pytest.mark.parametrize("text", [b"abc", 3, [1, 2]])
    def test_what_is_no_text(self, lm: LoadedModel, text: object) -> None:
        for use in (lm.score, lm.hidden, lm.attention, lm.generate, lm.read):
            with pytest.raises(UserError, match="a text must be a str, not"):
                use(text)  # type: ignore[operator]

    def test_numbers_say_how(self, tmp_path: Path) -> None:
        lm = longspan.load(run_folder(tmp_path / "run", NumberTokenizer(9)).path)
        with pytest.raises(UserError, match=r"not list \(token ids as text: '3 17 4'\)"):
            lm.score([1, 2])  # type: ignore[arg-type]
        assert len(lm.score("1 2").ids) == 2

    def test_a_state_of_something_else(self, lm: LoadedModel) -> None:
        other = of_letters("sha-rnn").read("abc")
        for use in (lm.score, lm.hidden, lm.attention, lm.generate, lm.read):
            with pytest.raises(UserError, match="this state comes from another model"):
                use("a", state=other)  # type: ignore[operator]
            with pytest.raises(UserError, match="a state comes from read, score or generate, it is no State"):
                use("a", state=lm.model.initial_state(1))  # type: ignore[operator]
