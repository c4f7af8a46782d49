"""One model that serves many clients: a thread owns it and continues all their texts together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from longspan.errors import UserError
from longspan.generation import check_sampling
from longspan.serving.batch import Batch
from longspan.serving.jobs import GenerateJob, Job, ReadingJob
from longspan.serving.limits import Busy, Limits, Stopping
from longspan.serving.reading_work import InspectedText, Reading, inspected, read_text, scored
from longspan.serving.scheduler import Scheduler
from longspan.serving.slots import SIZES_CPU, make_slots
from longspan.serving.threads import fastest_threads
from longspan.stop_strings import StopStrings

if TYPE_CHECKING:
    from longspan.language_model import LoadedModel
    from longspan.reading import TextState
    from longspan.serving.request import Finished, Sampling, Token

SLOTS_CPU, SLOTS_GPU = 32, 64


@dataclass(frozen=True)
class Stats:
    """Counts of one engine."""

    running: int  # jobs that have begun
    waiting: int
    tokens_generated: int
    tokens_read: int
    slots: int


class Engine:
    """Serves one model. `on_event` and `on_done` are called by its thread, so they must return soon."""

    def __init__(self, lm: LoadedModel, name: str, limits: Limits) -> None:
        self.lm, self.name, self.limits = lm, name, limits
        self.num_slots = limits.slots or (SLOTS_CPU if lm.device.type == "cpu" else SLOTS_GPU)
        self._waiting: deque[Job] = deque()
        self._scheduler: Scheduler | None = None
        self._threads = torch.get_num_threads()
        self._changed = threading.Condition()
        self._stopping = self._cancel_all = False
        self._thread = threading.Thread(target=self._run, name=f"longspan engine {name}", daemon=True)
        self._line_start: TextState | None = None
        self._ready = threading.Event()
        self._problem: Exception | None = None  # why it could not start

    def start(self) -> None:
        """Prepare the model and serve; returns when the first client can be served."""
        if self._scheduler is None:
            self._thread.start()
            self._ready.wait()
            if self._problem is not None:
                raise self._problem

    def stop(self, seconds: float) -> None:
        """Accept nothing more, finish what runs within `seconds`, then cancel it."""
        with self._changed:
            self._stopping = True
            refused = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for job in refused:
            job.fail(Stopping("the server is stopping"))
        if not self._thread.is_alive():
            return
        self._thread.join(seconds)
        with self._changed:
            self._cancel_all = True
            self._changed.notify()
        self._thread.join()

    @property
    def stats(self) -> Stats:
        scheduler = self._scheduler
        return Stats(
            running=scheduler.jobs if scheduler else 0,
            waiting=len(self._waiting),
            tokens_generated=scheduler.batch.tokens if scheduler else 0,
            tokens_read=scheduler.tokens_read if scheduler else 0,
            slots=self.num_slots,
        )

    def generate(
        self,
        start: TextState | None,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        on_event: Callable[[Token | Finished], None],
        *,
        keep_state: bool = False,
    ) -> Job:
        """Continue the text after `start` and a prompt; a text without either begins with a line end."""
        check_sampling(
            sampling.max_tokens,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            sampling.repetition_penalty,
        )
        StopStrings(sampling.stop)
        self.limits.check_prompt(len(prompt_ids))
        self.limits.check_generated(sampling.max_tokens)
        if not 0 <= (sampling.logprobs or 0) <= self.limits.alternatives:
            raise UserError(f"at most {self.limits.alternatives} alternatives can be given with every token")
        self._check_ids(prompt_ids)
        reading = self._read_after(start, prompt_ids)
        return self._submit(
            GenerateJob(self._wake, self.lm, reading, sampling, on_event, keep_state=keep_state)
        )

    def read(
        self, start: TextState | None, ids: Sequence[int], on_done: Callable[[TextState | Exception], None]
    ) -> Job:
        """The state after `start` and more tokens."""
        self.limits.check_prompt(len(ids))
        self._check_ids(ids)
        return self._submit(ReadingJob(self._wake, self._read_after(start, ids), on_done))

    def score(
        self,
        start: TextState | None,
        ids: Sequence[int],
        on_done: Callable[[tuple[list[float], TextState] | Exception], None],
    ) -> Job:
        """The nats of each token, and the state after them."""
        self.limits.check_prompt(len(ids))
        self._check_ids(ids)

        def work() -> Reading[tuple[list[float], TextState]]:
            return (yield from scored(self.lm.model, ids, start or self._at_line_start()))

        return self._submit(ReadingJob(self._wake, work(), on_done))

    def inspect(self, ids: Sequence[int], on_done: Callable[[InspectedText | Exception], None]) -> Job:
        """The bits of every token, and how far back every head looks at it; for short texts."""
        self.limits.check_inspected(len(ids))
        self._check_ids(ids)

        def work() -> Reading[InspectedText]:
            return (yield from inspected(self.lm.model, ids, self._at_line_start()))

        return self._submit(ReadingJob(self._wake, work(), on_done))

    def _read_after(self, start: TextState | None, ids: Sequence[int]) -> Reading[TextState]:
        if start is None and not len(ids):
            return self._at_line_start()
        return (yield from read_text(self.lm.model, ids, start))

    def _at_line_start(self) -> TextState:
        if self._line_start is None:
            self._line_start = self.lm.read("")
        return self._line_start

    def _check_ids(self, ids: Sequence[int]) -> None:
        size = self.lm.model.vocabulary_size
        if len(ids) and not 0 <= min(ids) <= max(ids) < size:
            raise UserError(f"token ids are 0 to {size - 1}, not {min(ids)} to {max(ids)}")

    def _submit(self, job: Job) -> Job:
        with self._changed:
            if self._stopping:
                raise Stopping("the server is stopping")
            if len(self._waiting) >= self.limits.waiting:
                raise Busy(f"{len(self._waiting)} requests wait already: try again later")
            self._waiting.append(job)
            self._changed.notify()
        return job

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        try:
            scheduler = self._scheduler = self._prepared()
        except Exception as problem:
            self._problem = problem
            return
        finally:
            self._ready.set()
        while self._wait(scheduler):
            scheduler.turn()

    def _prepared(self) -> Scheduler:
        """In the thread that will use it: the number of threads is known to libraries by thread."""
        torch.set_num_threads(self._threads)
        self._threads = fastest_threads(self.lm.model, SIZES_CPU[0], self._threads)
        return Scheduler(Batch(self.lm.model, make_slots(self.lm.model, self.num_slots)))

    def _wait(self, scheduler: Scheduler) -> bool:
        """Wait for work; False if the engine has stopped."""
        with self._changed:
            while True:
                self._waiting = scheduler.begin(self._waiting)
                if self._cancel_all:
                    scheduler.cancel_all()
                if scheduler.has_work:
                    return True
                if self._stopping:
                    return False
                self._changed.wait()
