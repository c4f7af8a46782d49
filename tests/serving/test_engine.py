"""One engine with one client at a time or a few: what it sends is what `LoadedModel` gives."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from longspan.data.tokenizers.byte import ByteTokenizer
from longspan.errors import UserError
from longspan.reading import READ_BLOCK
from longspan.serving.jobs import Cancelled
from longspan.serving.limits import Busy, PromptTooLong, Stopping, TooManyTokens
from longspan.serving.request import Finished, Sampling, Token
from tests.serving.small_models import KINDS, LETTERS, Answer, Client, ask, encode, loaded, running

PROMPT = "abcab\nfgh"


def soon(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


LONG = "abcdefghij\n" * 600  # more than ten blocks


@pytest.mark.parametrize("variant", KINDS)
def test_a_text_is_that_of_the_model(variant: str) -> None:
    lm = loaded(variant)
    with running(lm, slots=8) as engine:
        clients = [ask(engine, prompt, max_tokens=25, temperature=0.8, seed=3) for prompt in (PROMPT, "")]
        for client, prompt in zip(clients, (PROMPT, ""), strict=True):
            expected = lm.generate(prompt, 25, seed=3)
            assert client.wait().text == expected
            assert client.finished == Finished("length", "")
            assert tuple(token.id for token in client.tokens) == expected.ids
            log_probs = tuple(token.log_prob for token in client.tokens)
            assert log_probs == pytest.approx(expected.log_probs, abs=1e-3)


def test_all_settings_mean_what_they_mean_to_the_model() -> None:
    lm = loaded()
    with running(lm) as engine:
        for settings in (
            {"temperature": 0.0},
            {"temperature": 1.4, "top_k": 4},
            {"top_p": 0.6},
            {"temperature": 0.9, "repetition_penalty": 1.5, "seed": 2**64 - 1},
            {"seed": -5, "top_k": 5, "top_p": 0.9},
        ):
            client = ask(engine, PROMPT, max_tokens=30, **{"seed": 1, **settings})
            expected = lm.generate(PROMPT, 30, **{"temperature": 1.0, "seed": 1, **settings})
            assert client.wait().text == expected
        without_seed = {ask(engine, PROMPT, max_tokens=30).wait().text for _ in range(3)}
        assert len(without_seed) == 3


def test_it_ends_at_a_stop_string() -> None:
    lm = loaded()
    whole = lm.generate(PROMPT, 200, temperature=1.0, seed=1)
    stop = (whole[60:63], "never")
    expected = lm.generate(PROMPT, 200, temperature=1.0, seed=1, stop=stop)
    with running(lm) as engine:
        client = ask(engine, PROMPT, max_tokens=200, seed=1, stop=stop).wait()
    assert client.text == expected != ""
    assert client.finished.reason == "stop"
    assert len(client.tokens) == len(expected.ids) < 200


def test_text_that_is_held_back_comes_at_the_end() -> None:
    lm = loaded()
    whole = lm.generate(PROMPT, 30, temperature=1.0, seed=1)
    with running(lm) as engine:
        client = ask(engine, PROMPT, max_tokens=30, seed=1, stop=(whole[-2:] + "?",)).wait()
    assert client.finished == Finished("length", whole[-2:])
    assert client.text == whole


def test_characters_of_several_bytes_come_whole() -> None:
    lm = loaded()

    class Euros(ByteTokenizer):
        """Every token of the small model is one byte of the sign for Euro."""

        def pieces(self) -> list[bytes]:
            return ["€".encode()[n % 3 : n % 3 + 1] for n in range(256)]

    lm = replace(lm, tokenizer=Euros())
    client = Client()
    with running(lm) as engine:
        start = lm.read("\x00")  # the first byte of the sign
        engine.generate(start, [1], Sampling(max_tokens=9, seed=1), client)
        client.wait()
        expected = lm.generate("\x01", 9, temperature=1.0, seed=1, state=start)
    assert client.text == expected
    assert "\ufffd" in expected or "€" in expected


def test_alternatives_are_the_most_probable_tokens() -> None:
    lm = loaded()
    with running(lm) as engine:
        plain = ask(engine, PROMPT, max_tokens=5, seed=1).wait()
        some = ask(engine, PROMPT, max_tokens=5, seed=1, logprobs=3).wait()
        own = ask(engine, PROMPT, max_tokens=5, seed=1, logprobs=0).wait()
    assert plain.drawn == some.drawn == own.drawn
    assert all(token.top == () for token in (*plain.tokens, *own.tokens))
    state = lm.read(PROMPT)
    for token in some.tokens:
        log_probs_V = lm.model.head.log_probs(state.hidden_D[None, None])[0, 0]
        best = log_probs_V.topk(3)
        assert [id for id, _ in token.top] == best.indices.tolist()
        assert [value for _, value in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        state = lm.read(LETTERS[token.id], state)


@pytest.mark.parametrize("variant", ["modern, n-grams", "sha-rnn", "gpt"])
def test_the_state_after_a_text_is_kept_if_asked_for(variant: str) -> None:
    lm, client = loaded(variant), Client()
    with running(lm) as engine:
        start = lm.read(PROMPT)
        job = engine.generate(
            start, encode(lm, "ab"), Sampling(max_tokens=12, seed=1), client, keep_state=True
        )
        client.wait()
        expected = lm.generate("ab", 12, temperature=1.0, seed=1, state=start)
        assert client.text == expected
        assert job.state is not None
        assert (job.state.tokens, job.state.tail) == (expected.state.tokens, expected.state.tail)
        assert torch.equal(job.state.hidden_D, expected.state.hidden_D)
        again = ask(engine, "", job.state, max_tokens=9, seed=2).wait()
        assert again.text == lm.generate("", 9, temperature=1.0, seed=2, state=expected.state)


def test_no_tokens_are_a_text_too() -> None:
    lm, client = loaded(), Client()
    with running(lm) as engine:
        job = engine.generate(None, encode(lm, PROMPT), Sampling(max_tokens=0), client, keep_state=True)
        client.wait()
    assert client.events == [Finished("length", "")]
    assert job.state is not None
    assert torch.equal(job.state.hidden_D, lm.read(PROMPT).hidden_D)


def test_reading_and_scores_are_those_of_the_model() -> None:
    lm, read, begun, scores, more = loaded(), Answer(), Answer(), Answer(), Answer()
    with running(lm) as engine:
        start = lm.read("abc")
        engine.read(start, encode(lm, LONG), read)
        engine.read(None, [], begun)
        engine.score(None, encode(lm, PROMPT), scores)
        engine.score(start, encode(lm, LONG), more)
        assert torch.equal(read.wait().hidden_D, lm.read(LONG, start).hidden_D)
        assert torch.equal(begun.wait().hidden_D, lm.read("").hidden_D)
        assert scores.wait()[0] == list(lm.score(PROMPT).token_nats)
        nats, after = more.wait()
    expected = lm.score(LONG, start)
    assert nats == list(expected.token_nats)
    assert after.tokens == expected.state.tokens == len(LONG) + 3


def test_inspection_has_bits_and_look_back() -> None:
    lm, found = loaded(), Answer()
    text = LONG[: READ_BLOCK + 20]
    with running(lm) as engine:
        engine.inspect(encode(lm, text), found)
        seen = found.wait()
        with pytest.raises(PromptTooLong, match="too long to inspect"):
            engine.inspect([0] * 5000, found)
    assert seen.ids == encode(lm, text)
    assert [bits * math.log(2) for bits in seen.bits] == pytest.approx(list(lm.score(text).token_nats))
    expected = lm.attention(text, lm.read(""))
    assert [layer.name for layer in seen.layers] == [layer.name for layer in expected]
    for layer, attention in zip(seen.layers, expected, strict=True):
        assert [len(of_head) for of_head in layer.reach] == [len(text)] * 3
        means = torch.tensor(layer.mean_distance, dtype=torch.float64).mean(1)
        assert means == pytest.approx(attention.mean_distance_H, rel=0.05)


def test_a_text_can_be_cancelled_and_others_go_on() -> None:
    lm, client = loaded(), Client()
    with running(lm, generated_tokens=10**9) as engine:
        job = engine.generate(None, [1], Sampling(max_tokens=10**9, seed=1), client, keep_state=True)
        other = ask(engine, PROMPT, max_tokens=40, seed=1)
        assert client.begun.wait(60)
        job.cancel()
        assert client.wait().finished.reason == "cancelled"
        job.cancel()  # nothing happens
        assert other.wait().text == lm.generate(PROMPT, 40, temperature=1.0, seed=1)
        assert engine.stats.running == 0
        assert job.state is not None
        assert job.state.tokens == 1 + len(client.tokens)
        cut = lm.generate("b", len(client.tokens), temperature=1.0, seed=1)
        assert client.text == cut
        assert torch.equal(job.state.hidden_D, cut.state.hidden_D)


def test_reading_can_be_cancelled() -> None:
    lm, found, first = loaded(), Answer(), Answer()
    with running(lm) as engine:
        jobs = [engine.read(None, encode(lm, LONG), first), engine.read(None, encode(lm, LONG), found)]
        jobs[1].cancel()
        assert isinstance(found.wait(), Cancelled)
        assert first.wait().tokens == len(LONG)


def test_a_long_prompt_does_not_stop_the_others() -> None:
    lm, reading = loaded(), Answer()
    tokens_at_end: list[int] = []
    with running(lm) as engine:
        streaming = Client()
        engine.generate(None, [1], Sampling(max_tokens=400, seed=1), streaming)
        assert streaming.begun.wait(60)

        def ended(_: object) -> None:
            tokens_at_end.append(len(streaming.tokens))
            reading(None)

        before = len(streaming.tokens)
        engine.read(None, encode(lm, LONG), ended)
        reading.wait()
        streaming.wait()
    blocks = math.ceil(len(LONG) / READ_BLOCK)
    assert tokens_at_end[0] - before >= blocks - 1  # at least one token between two blocks


def test_a_full_queue_is_refused_and_nothing_is_lost() -> None:
    lm = loaded()
    with running(lm, slots=2, waiting=3, generated_tokens=10**9) as engine:
        endless = [Client() for _ in range(2)]
        jobs = [engine.generate(None, [1], Sampling(max_tokens=10**9), client) for client in endless]
        assert all(client.begun.wait(60) for client in endless)
        waiting = [ask(engine, PROMPT, max_tokens=5, seed=n) for n in range(3)]
        with pytest.raises(Busy, match="3 requests wait already"):
            ask(engine, PROMPT, max_tokens=5)
        assert (engine.stats.waiting, engine.stats.running) == (3, 2)
        scores = Answer()
        jobs[0].cancel()
        endless[0].wait()
        for seed, client in enumerate(waiting):
            assert client.wait().text == lm.generate(PROMPT, 5, temperature=1.0, seed=seed)
        engine.score(None, encode(lm, PROMPT), scores)  # needs no slot
        assert len(scores.wait()[0]) == len(PROMPT)
        jobs[1].cancel()
        endless[1].wait()


def test_mistakes_are_refused_before_they_wait() -> None:
    lm, client = loaded(), Client()
    with running(lm, prompt_tokens=10, generated_tokens=20) as engine:
        for ids, settings, kind, message in (
            ([0] * 11, {}, PromptTooLong, "a text of 11 tokens is too long"),
            ([0], {"max_tokens": 21}, TooManyTokens, "21 tokens are too many"),
            ([11], {}, UserError, "token ids are 0 to 10"),
            ([-1], {}, UserError, "token ids are 0 to 10"),
            ([0], {"temperature": -1.0}, UserError, "temperature"),
            ([0], {"temperature": math.nan}, UserError, "temperature"),
            ([0], {"top_k": 0}, UserError, "top-k"),
            ([0], {"top_p": 0.0}, UserError, "top-p"),
            ([0], {"seed": 2**64}, UserError, "a seed has at most 64 bits"),
            ([0], {"stop": ("",)}, UserError, "stop strings"),
            ([0], {"logprobs": 21}, UserError, "at most 20 alternatives"),
            ([0], {"repetition_penalty": 0.0}, UserError, "repetition penalty"),
        ):
            with pytest.raises(kind, match=message):
                engine.generate(None, ids, Sampling(**settings), client)
    assert client.events == []


def test_a_model_of_nan_ends_its_texts_with_an_error() -> None:
    lm, scores = loaded(), Answer()
    with torch.no_grad():
        next(lm.model.parameters())[3] = math.nan  # only what reads this token is broken
    with running(lm) as engine:
        sound = ask(engine, "ab", max_tokens=3, seed=1, top_k=1)
        broken = ask(engine, "ad", max_tokens=3, seed=1).wait()
        assert broken.finished.reason == "error"
        assert "NaN" in str(broken.finished.error)
        sound.wait()
        engine.score(None, [1, 2], scores)
        assert len(scores.wait()[0]) == 2


def test_an_error_of_one_prompt_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = loaded()
    forward = type(lm.model).forward

    def fail(self, tokens_BT, state):
        if (tokens_BT == 7).any() and tokens_BT.shape[1] > 1:
            raise RuntimeError("a block cannot read this")
        return forward(self, tokens_BT, state)

    with running(lm) as engine:
        monkeypatch.setattr(type(lm.model), "forward", fail)
        answer, other = Answer(), ask(engine, "abc", max_tokens=30, seed=1)
        failed = ask(engine, "abh", max_tokens=30, seed=1).wait()
        engine.read(None, encode(lm, "hh"), answer)
        assert str(failed.finished.error) == str(answer.wait()) == "a block cannot read this"
        assert other.wait().text == lm.generate("abc", 30, temperature=1.0, seed=1)


def test_after_a_step_that_failed_the_engine_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = loaded()
    with running(lm) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(type(engine._scheduler.batch._slots), "launch", lambda *_: 1 / 0)
            assert ask(engine, PROMPT, max_tokens=9).wait().finished.reason == "error"
            ended, last = Client(), Sampling(max_tokens=1, seed=1)  # needs no step, but for its state
            job = engine.generate(None, encode(lm, PROMPT), last, ended, keep_state=True)
            assert ended.wait().finished.reason == "length"
            assert job.state is not None
        assert ask(engine, PROMPT, max_tokens=9, seed=1).wait().text == lm.generate(
            PROMPT, 9, temperature=1.0, seed=1
        )


def test_a_client_whose_function_fails_is_cancelled() -> None:
    lm = loaded()
    with running(lm, generated_tokens=10**9) as engine:

        def gone(event: Token | Finished) -> None:
            raise ConnectionError

        engine.generate(None, [1], Sampling(max_tokens=10**9), gone)
        other = ask(engine, PROMPT, max_tokens=40, seed=1)
        assert other.wait().text == lm.generate(PROMPT, 40, temperature=1.0, seed=1)
        assert soon(lambda: engine.stats.running == 0)


def test_a_stop_finishes_what_runs_and_refuses_what_waits() -> None:
    lm = loaded()
    with running(lm, slots=1) as engine:
        running_one = ask(engine, PROMPT, max_tokens=300, seed=1)
        assert running_one.begun.wait(60)
        waiting = ask(engine, PROMPT, max_tokens=5)
        engine.stop(60)
        assert running_one.text == lm.generate(PROMPT, 300, temperature=1.0, seed=1)
        assert isinstance(waiting.wait().finished.error, Stopping)
        with pytest.raises(Stopping, match="the server is stopping"):
            ask(engine, PROMPT, max_tokens=5)


def test_a_stop_without_time_cancels() -> None:
    lm, found = loaded(), Answer()
    with running(lm, generated_tokens=10**9, prompt_tokens=10**9) as engine:
        client = Client()
        engine.generate(None, [1], Sampling(max_tokens=10**9), client, keep_state=True)
        engine.read(None, [1] * 10**6, found)
        assert client.begun.wait(60)
        assert soon(lambda: engine.stats.tokens_read > READ_BLOCK)
        began = time.monotonic()
        engine.stop(0.1)
        assert time.monotonic() - began < 20
        assert client.finished.reason == "cancelled"
        assert isinstance(found.wait(), Cancelled)
    assert not any("longspan engine" in thread.name for thread in threading.enumerate())
