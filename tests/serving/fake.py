"""An engine with the interface of the real one, and as little as possible behind it.

Jobs run one after the other in one thread. Tests of the HTTP side can hold the engine, or let it fail.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from longspan.generation import sample_from
from longspan.language_model import LoadedModel
from longspan.reading import TextState, begin, nats_of, read
from longspan.serving.limits import Busy, Limits, Stopping
from longspan.serving.request import Finished, Sampling, Token
from longspan.stop_strings import StopStrings


class FakeJob:
    def __init__(self) -> None:
        self.cancelled, self.state = threading.Event(), None

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass
class Stats:
    running: int = 0
    waiting: int = 0
    tokens_generated: int = 0
    tokens_read: int = 0
    slots: int = 1


class FakeEngine:
    """`gate` holds the engine while it is cleared; `fault` is raised by the next token."""

    def __init__(self, lm: LoadedModel, name: str, limits: Limits) -> None:
        self.lm, self.name, self.limits, self.stats = lm, name, limits, Stats()
        self.gate, self.fault = threading.Event(), None
        self.gate.set()
        self.jobs: list[FakeJob] = []
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float) -> None:
        self._stopping = True
        self._queue.put(None)
        self._thread.join(seconds)
        for job in self.jobs:
            job.cancel()
        self._thread.join(5)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            self.stats.waiting -= 1
            self.stats.running = 1
            self.gate.wait()
            task()
            self.stats.running = 0

    def _add(self, task: Callable[[FakeJob], None]) -> FakeJob:
        if self._stopping:
            raise Stopping("the server is stopping")
        if self.stats.waiting >= self.limits.waiting:
            raise Busy("too many requests wait: try again later")
        job = FakeJob()
        self.jobs.append(job)
        self.stats.waiting += 1
        self._queue.put(lambda: task(job))
        return job

    def _start(self, start: TextState | None, ids: Sequence[int]) -> TextState:
        self.stats.tokens_read += len(ids)
        if start is not None:
            return read(self.lm.model, ids, start)
        return begin(self.lm.model, ids) if len(ids) else self.lm.read("")

    def generate(
        self,
        start: TextState | None,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_event: Callable[[Token | Finished], None],
        *,
        keep_state: bool = False,
    ) -> FakeJob:
        def task(job: FakeJob) -> None:
            ids: list[int] = []
            try:
                state = self._start(start, prompt_ids)
                generator = torch.Generator()
                generator.manual_seed(sampling.seed if sampling.seed is not None else generator.seed())
                text, end = self.lm.tokenizer.stream(), StopStrings(sampling.stop)
                for token in state.tail:
                    text.push(token)
                drawn = sample_from(
                    self.lm.model,
                    state,
                    tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    top_k=sampling.top_k,
                    top_p=sampling.top_p,
                    repetition_penalty=sampling.repetition_penalty,
                    generator=generator,
                )
                for token, log_prob in drawn:
                    self.gate.wait()
                    if job.cancelled.is_set():
                        on_event(Finished("cancelled", ""))
                        return
                    if self.fault is not None:
                        raise self.fault
                    ids.append(token)
                    self.stats.tokens_generated += 1
                    top = tuple((other, -1.0 - other) for other in range(sampling.logprobs or 0))
                    on_event(Token(token, end.push(text.push(token)), log_prob, top))
                    if end.found is not None:
                        break
                job.state = read(self.lm.model, ids, state, 1) if keep_state else None
                rest = "" if end.found is not None else end.push(text.flush()) + end.flush()
                on_event(Finished("length" if end.found is None else "stop", rest))
            except Exception as problem:
                on_event(Finished("error", "", problem))

        return self._add(task)

    def read(self, start: TextState | None, ids: Sequence[int], on_done: Callable[[Any], None]) -> FakeJob:
        return self._add(lambda job: on_done(self._start(start, ids)))

    def score(self, start: TextState | None, ids: Sequence[int], on_done: Callable[[Any], None]) -> FakeJob:
        return self._add(lambda job: on_done(nats_of(self.lm.model, ids, start or self.lm.read(""))))
