"""Small models to serve, of every architecture, and a client that collects what an engine sends."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from longspan.config import RunConfig
from longspan.data.tokenizers.character import CharacterTokenizer
from longspan.language_model import LoadedModel
from longspan.reading import TextState
from longspan.serving.engine import Engine
from longspan.serving.limits import Limits
from longspan.serving.request import Finished, Sampling, Token
from tests.models.test_contract import VARIANTS, VOCABULARY
from tests.using.test_every_model import lively

KINDS = (  # every architecture, and every way to decode it
    "modern, n-grams",
    "modern, convolution",
    "adaptive-span, dynamic",
    "adaptive-span, pattern",
    "all-attention",
    "sha-rnn",
    "transformer-xl",
    "transformer-xl, from zeros, pre-norm",
    "gpt",
)
LETTERS = "abcdefghij\n"[:VOCABULARY]


def loaded(variant: str = "modern, keys and values") -> LoadedModel:
    model = lively(variant).float().eval()
    model.refresh()
    config = RunConfig(name="small", model=VARIANTS[variant])
    return LoadedModel(model, CharacterTokenizer(LETTERS), config, torch.device("cpu"), Path("small"))


class Client:
    """The events of one job."""

    def __init__(self) -> None:
        self.events: list[Token | Finished] = []
        self.begun, self.done = threading.Event(), threading.Event()

    def __call__(self, event: Token | Finished) -> None:
        self.events.append(event)
        self.begun.set()
        if isinstance(event, Finished):
            self.done.set()

    def wait(self) -> Client:
        assert self.done.wait(60)
        return self

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last

    @property
    def tokens(self) -> list[Token]:
        return [event for event in self.events if isinstance(event, Token)]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def drawn(self) -> list[tuple[int, float]]:
        return [(token.id, token.log_prob) for token in self.tokens]


class Answer:
    """What a job of reading hands over."""

    def __init__(self) -> None:
        self._done = threading.Event()

    def __call__(self, found: object) -> None:
        self._found = found
        self._done.set()

    def wait(self):
        assert self._done.wait(60)
        return self._found


@contextmanager
def running(lm: LoadedModel, **limits: int) -> Iterator[Engine]:
    engine = Engine(lm, "small", Limits(**limits))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop(0)


def ask(engine: Engine, prompt: str, start: TextState | None = None, **settings: object) -> Client:
    client = Client()
    engine.generate(start, encode(engine.lm, prompt), Sampling(**settings), client)  # type: ignore[arg-type]
    return client


def encode(lm: LoadedModel, text: str) -> Sequence[int]:
    return lm.tokenizer.encode(text).tolist() if text else []
