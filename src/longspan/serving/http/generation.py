"""Running the choices of a request and writing them as they come."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from longspan.errors import UserError
from longspan.serving.http.errors import ApiError
from longspan.serving.http.events import Stream
from longspan.serving.http.schemas import SamplingFields
from longspan.serving.http.service import Served, Service
from longspan.serving.limits import Stopping
from longspan.serving.request import Finished, Sampling, Token

if TYPE_CHECKING:
    from longspan.reading import TextState
    from longspan.serving.jobs import Job

Event = tuple[int, "Token | Finished"]  # the number of the choice


@dataclass(frozen=True)
class Prompt:
    """What choices continue."""

    ids: Sequence[int]
    text: str = ""  # shown by echo
    nats: Sequence[float] | None = None  # of all ids but the first, if the prompt is scored
    state: TextState | None = None  # after `ids`, if they have been read


def sampling(asked: SamplingFields, service: Service) -> Sampling:
    """The settings of a request; what it leaves out has OpenAI's defaults."""
    tokens = 16 if asked.max_tokens is None else asked.max_tokens
    service.limits.check_generated(tokens)
    stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    return Sampling(
        max_tokens=tokens,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        seed=asked.seed,
        repetition_penalty=1.0 if asked.repetition_penalty is None else asked.repetition_penalty,
        stop=stop,
        logprobs=asked.logprobs,
    )


@dataclass
class Generation:
    """The jobs of a request; their events come in one stream."""

    service: Service
    served: Served
    choices: int
    began: float = field(default_factory=time.perf_counter)
    jobs: list[Job] = field(default_factory=list)
    generated: int = 0  # tokens
    _stream: Stream[Event] = field(default_factory=Stream)
    _last: dict[int, float] = field(default_factory=dict)  # when the last token of a choice came

    def add(
        self, start: TextState | None, ids: Sequence[int], how: Sampling, keep_state: bool = False
    ) -> None:
        """Start one more choice."""
        outbox, stream, number = self.service.outbox, self._stream, len(self.jobs)
        self.jobs.append(
            self.served.engine.generate(
                start, ids, how, lambda event: outbox.put(stream, (number, event)), keep_state=keep_state
            )
        )

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Events that came together, until all choices are finished. A choice that fails raises an error."""
        open_choices = len(self.jobs)
        while open_choices:
            batch = await self._stream.batch()
            for _, event in batch:
                if isinstance(event, Finished):
                    open_choices -= 1
                    _check(event)
            self._measure(batch)
            yield batch

    def cancel(self) -> None:
        """End what still runs."""
        for job in self.jobs:
            job.cancel()

    def _measure(self, batch: list[Event]) -> None:
        now, metrics = time.perf_counter(), self.service.metrics
        counts: dict[int, int] = {}
        for number, event in batch:
            if isinstance(event, Token):
                counts[number] = counts.get(number, 0) + 1
        for number, count in counts.items():
            self.generated += count
            last = self._last.get(number)
            if last is None:
                metrics.first_token.observe(now - self.began)
            else:
                metrics.tokens(count, now - last)
            self._last[number] = now


def _check(event: Finished) -> None:
    """Only the server cancels a job whose client still listens: it stops."""
    if event.reason == "cancelled":
        raise Stopping("the server is stopping: the text is not complete")
    if isinstance(event.error, UserError):
        raise event.error
    if event.reason == "error":
        raise ApiError(500, f"generation failed: {event.error}", "generation_failed")


async def start(
    service: Service, served: Served, prompts: Sequence[Prompt], n: int, how: Sampling, scored: bool
) -> tuple[Generation, list[Prompt]]:
    """Start `n` choices of each prompt; one with several choices, or a scored one, is read once before."""
    generation = Generation(service, served, n * len(prompts))
    try:
        read = await asyncio.gather(*(_read(service, served, prompt, n, scored) for prompt in prompts))
        for prompt, number in itertools.product(read, range(n)):
            own = how if how.seed is None else replace(how, seed=how.seed + number)
            generation.add(prompt.state, prompt.ids if prompt.state is None else (), own)
    except BaseException:
        generation.cancel()
        raise
    return generation, read


async def _read(service: Service, served: Served, prompt: Prompt, n: int, scored: bool) -> Prompt:
    engine, ids = served.engine, prompt.ids
    if scored and ids:  # the first token has no probability: nothing comes before it
        first: TextState = await service.result(lambda done: engine.read(None, ids[:1], done))
        scores: tuple[list[float], TextState] = await service.result(
            lambda done: engine.score(first, ids[1:], done)
        )
        return replace(prompt, nats=scores[0], state=scores[1])
    if n > 1:
        return replace(prompt, state=await service.result(lambda done: engine.read(None, ids, done)))
    return prompt
