"""Many clients at once: each gets what it would get alone, to the last bit."""

from __future__ import annotations

import random
import time

import pytest

from longspan.serving.request import Sampling
from tests.serving.small_models import LETTERS, Client, loaded, running


def some_jobs(numbers: random.Random, count: int, lengths: list[int]) -> list[tuple[list[int], Sampling]]:
    jobs = []
    for _ in range(count):
        prompt = [numbers.randrange(len(LETTERS)) for _ in range(numbers.choice(lengths))]
        settings = Sampling(
            max_tokens=numbers.randrange(1, 40),
            temperature=numbers.choice([0.0, 0.5, 1.0, 1.7]),
            top_k=numbers.choice([None, None, 3, 8]),
            top_p=numbers.choice([None, None, 0.5, 0.95]),
            repetition_penalty=numbers.choice([1.0, 1.0, 1.2]),
            seed=numbers.randrange(2**40),
            stop=numbers.choice([(), (), ("ab", "ba"), ("c\n",)]),
            logprobs=numbers.choice([None, 0, 4]),
        )
        jobs.append((prompt, settings))
    return jobs


@pytest.mark.parametrize(
    ("variant", "count"), [("modern, n-grams", 40), ("adaptive-span", 8), ("sha-rnn", 6), ("gpt", 5)]
)
def test_a_text_does_not_depend_on_the_others(variant: str, count: int) -> None:
    numbers = random.Random(variant)
    jobs = some_jobs(numbers, count, [0, 1, 5, 40] + [700] * (variant != "gpt"))
    with running(loaded(variant)) as engine:
        together, cancelled = [], []
        for number, (prompt, settings) in enumerate(jobs):
            client = Client()
            engine.generate(None, prompt, settings, client)
            together.append(client)
            if number % 5 == 0:  # clients that leave in the middle
                leaving = Client()
                cancelled.append(engine.generate(None, prompt, settings, leaving))
            if numbers.random() < 0.4:
                time.sleep(numbers.random() * 0.02)
                if cancelled:
                    cancelled.pop().cancel()
        for client in together:
            client.wait()
        for client, (prompt, settings) in zip(together, jobs, strict=True):
            alone = Client()
            engine.generate(None, prompt, settings, alone)
            assert alone.wait().events == client.events  # texts, log-probabilities and alternatives


def test_the_choices_of_one_prompt_differ_only_by_their_seed() -> None:
    lm = loaded()
    start = lm.read("abcabc")
    with running(lm) as engine:
        clients = [Client() for _ in range(20)]
        for number, client in enumerate(clients):
            engine.generate(start, [], Sampling(max_tokens=30, seed=number % 10), client)
        texts = [client.wait().text for client in clients]
    assert texts[:10] == texts[10:]
    assert len(set(texts)) == 10
    assert texts[3] == lm.generate("", 30, temperature=1.0, seed=3, state=start)
