"""Completions as OpenAI's own client sees them, against a real server, compared with the model itself."""

from __future__ import annotations

import math
from collections.abc import Iterator

import openai
import pytest

from longspan.language_model import LoadedModel
from tests.serving.running import Client, tiny_lm

PROMPT = "the cat sat"


@pytest.fixture(scope="module")
def lm() -> LoadedModel:
    return tiny_lm()


@pytest.fixture(scope="module")
def ai(client: Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client.url}/v1", api_key="none", max_retries=0, timeout=30) as found:
        yield found


def test_the_text_is_the_models(ai: openai.OpenAI, lm: LoadedModel) -> None:
    done = ai.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0.5, seed=3)
    assert done.choices[0].text == lm.generate(PROMPT, 12, 0.5, seed=3)
    assert done.choices[0].finish_reason == "length"
    assert done.object == "text_completion"
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (11, 12, 23)


def test_the_default_is_sixteen_tokens_at_temperature_one(ai: openai.OpenAI, lm: LoadedModel) -> None:
    done = ai.completions.create(model="tiny", prompt=PROMPT, seed=5)
    assert done.choices[0].text == lm.generate(PROMPT, 16, 1.0, seed=5)


@pytest.mark.parametrize("include", [True, False])
def test_a_stream_has_the_same_text(ai: openai.OpenAI, lm: LoadedModel, include: bool) -> None:
    stream = ai.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=30,
        seed=4,
        stream=True,
        stream_options={"include_usage": include},
    )
    events = list(stream)
    texts = [event.choices[0].text for event in events if event.choices]
    assert "".join(texts) == lm.generate(PROMPT, 30, 1.0, seed=4)
    assert len(texts) > 10
    reasons = [event.choices[0].finish_reason for event in events if event.choices]
    assert reasons == [None] * (len(texts) - 1) + ["length"]
    used = [event.usage.completion_tokens for event in events if event.usage is not None]
    assert used == ([30] if include else [])
    assert len({event.id for event in events}) == 1


def test_several_choices_have_seeds_that_follow(ai: openai.OpenAI, lm: LoadedModel) -> None:
    done = ai.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, seed=-2, n=3)
    assert [one.index for one in done.choices] == [0, 1, 2]
    assert [one.text for one in done.choices] == [lm.generate(PROMPT, 8, 1.0, seed=s) for s in (-2, -1, 0)]
    assert done.usage is not None
    assert done.usage.completion_tokens == 24


def test_several_choices_in_a_stream(ai: openai.OpenAI, lm: LoadedModel) -> None:
    texts = ["", ""]
    for event in ai.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, seed=1, n=2, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == [lm.generate(PROMPT, 8, 1.0, seed=s) for s in (1, 2)]


def test_several_prompts_as_text_and_as_tokens(ai: openai.OpenAI, lm: LoadedModel) -> None:
    wanted = [str(lm.generate(prompt, 6, 1.0, seed=1)) for prompt in ("one", "two", "one", "two")]
    seeds = [str(lm.generate(prompt, 6, 1.0, seed=2)) for prompt in ("one", "two")]
    ids = [[*b"one"], [*b"two"]]
    texts = ai.completions.create(model="tiny", prompt=["one", "two"], max_tokens=6, seed=1)
    tokens = ai.completions.create(model="tiny", prompt=ids, max_tokens=6, seed=1)
    assert [one.text for one in (*texts.choices, *tokens.choices)] == wanted
    both = ai.completions.create(model="tiny", prompt=["one", "two"], max_tokens=6, seed=1, n=2)
    assert [one.text for one in both.choices] == [wanted[0], seeds[0], wanted[1], seeds[1]]
    single = ai.completions.create(model="tiny", prompt=[*b"one"], max_tokens=6, seed=1)
    assert single.choices[0].text == wanted[0]


def test_stop_strings_end_the_text(ai: openai.OpenAI, lm: LoadedModel) -> None:
    whole = str(lm.generate(PROMPT, 40, 1.0, seed=7))
    stop = whole[9:11]
    done = ai.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, seed=7, stop=stop)
    assert done.choices[0].text == whole[: whole.index(stop)]
    assert done.choices[0].finish_reason == "stop"
    stream = ai.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=40, seed=7, stop=["never seen", stop], stream=True
    )
    assert "".join(event.choices[0].text for event in stream) == whole[: whole.index(stop)]


def test_log_probabilities_are_the_models(ai: openai.OpenAI, lm: LoadedModel) -> None:
    wanted = lm.generate(PROMPT, 5, 1.0, seed=2)
    done = ai.completions.create(model="tiny", prompt=PROMPT, max_tokens=5, seed=2, logprobs=2)
    found = done.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs == pytest.approx(wanted.log_probs, abs=1e-4)
    assert found.text_offset is not None
    assert found.text_offset[0] == 0
    assert found.top_logprobs is not None
    assert all(2 <= len(one) <= 3 for one in found.top_logprobs)
    assert [one[token] for one, token in zip(found.top_logprobs, found.tokens or (), strict=True)] == (
        found.token_logprobs
    )
    assert all(len(values) == 5 for values in (found.tokens or (), found.text_offset, found.top_logprobs))


def test_echo_scores_the_prompt(ai: openai.OpenAI, lm: LoadedModel) -> None:
    """`max_tokens` of 0: as tools for evaluation ask for the probability of a text."""
    done = ai.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
    assert done.choices[0].text == PROMPT
    assert done.choices[0].finish_reason == "length"
    found = done.choices[0].logprobs
    assert found is not None
    assert found.tokens == list(PROMPT)
    assert found.text_offset == list(range(len(PROMPT)))
    first, *others = found.token_logprobs or ()
    assert first is None
    scored = lm.score(PROMPT[1:], lm.read(PROMPT[0]))
    assert math.fsum(others) == pytest.approx(-scored.nats, abs=1e-3)


def test_echo_in_a_stream_and_for_tokens(ai: openai.OpenAI, lm: LoadedModel) -> None:
    wanted = PROMPT + lm.generate(PROMPT, 5, 1.0, seed=2)
    stream = ai.completions.create(
        model="tiny", prompt=[*PROMPT.encode()], max_tokens=5, seed=2, echo=True, stream=True
    )
    assert "".join(event.choices[0].text for event in stream) == wanted


def test_an_empty_prompt_starts_a_line(client: Client, lm: LoadedModel) -> None:
    wanted = lm.generate("", 6, 1.0, seed=1)
    assert client.complete("", max_tokens=6, seed=1).text == wanted
    left_out = client.post("/v1/completions", {"model": "tiny", "max_tokens": 6, "seed": 1})
    assert left_out.text == wanted


def test_filters_of_ours(client: Client, lm: LoadedModel) -> None:
    wanted = lm.generate(PROMPT, 9, 0.7, 5, 0.9, 11, repetition_penalty=1.3)
    more = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 11, "repetition_penalty": 1.3}
    assert client.complete(PROMPT, max_tokens=9, **more).text == wanted


def test_models(ai: openai.OpenAI) -> None:
    assert [one.id for one in ai.models.list()] == ["tiny"]
    assert ai.models.retrieve("tiny").owned_by == "longspan"
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        ai.models.retrieve("other")


def test_errors_are_those_of_the_client(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        ai.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError) as caught:
        ai.completions.create(model="tiny", prompt=PROMPT, max_tokens=10**6)
    assert caught.value.code == "max_tokens_exceeded"
    with pytest.raises(openai.UnprocessableEntityError, match="temperature"):
        ai.completions.create(model="tiny", prompt=PROMPT, temperature=-1)
