"""Which job is served next. Everything here runs in the thread of an engine.

A turn reads a bounded amount of texts and then draws one token for every text that is continued.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from longspan.reading import READ_BLOCK
from longspan.serving.batch import Batch
from longspan.serving.jobs import GenerateJob, Job, log

READERS = 8  # texts that are read at once without being continued


class Scheduler:
    """Jobs that have begun: those that read, and the batch of texts that are continued."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.tokens_read = 0
        self._reading: deque[Job] = deque()
        self._owed = 0.0  # seconds that reading has taken from the texts that are continued

    @property
    def jobs(self) -> int:
        return len(self._reading) + len(self.batch.jobs)

    @property
    def has_work(self) -> bool:
        return self.jobs > 0

    def begin(self, waiting: Iterable[Job]) -> deque[Job]:
        """Begin jobs, in their order, as far as there is room; returns those that still wait."""
        generating = len(self.batch.jobs) + sum(isinstance(job, GenerateJob) for job in self._reading)
        reading = len(self._reading)
        still: deque[Job] = deque()
        for job in waiting:
            if isinstance(job, GenerateJob):
                has_room = generating < self.batch.size
                generating += 1
            else:
                has_room = reading < READERS
                reading += 1
            (self._reading if has_room or job.is_cancelled else still).append(job)
        return still

    def turn(self) -> None:
        try:
            self._drop_cancelled()
            self._read_some()
            self._continue()
        except Exception as problem:  # of no job in particular
            log.exception("a turn failed; the texts that were continued end")
            self.batch.fail_all(problem)

    def cancel_all(self) -> None:
        """End every job at once."""
        jobs: list[Job] = [*self._reading, *self.batch.jobs]
        self._reading.clear()
        self.batch.leave(list(self.batch.jobs))
        for job in jobs:
            job.end_cancelled()
            if isinstance(job, GenerateJob):
                if job.has_to_read:  # there is no time for its state
                    job.end_cancelled()
                job.deliver()

    def _drop_cancelled(self) -> None:
        dropped = [job for job in self._reading if job.is_cancelled and not _has_ended(job)]
        if dropped:
            self._reading = deque(job for job in self._reading if job not in dropped)
        leaving = [job for job in self.batch.jobs if job.is_cancelled]
        self.batch.leave(leaving)
        for job in [*dropped, *leaving]:
            job.end_cancelled()
            if isinstance(job, GenerateJob):
                job.deliver()
        self._reading.extend(job for job in leaving if job.has_to_read)

    def _read_some(self) -> None:
        """Read about one block in all, unless the texts that are continued have to catch up."""
        continued = len(self.batch.jobs)
        if not self._reading or (continued and self._owed > 0):
            return
        began, budget = time.monotonic(), READ_BLOCK
        while self._reading and budget > 0:
            budget -= self._read_unit(self._reading.popleft())
        share = continued / (continued + len(self._reading) + 1)  # of all jobs
        self._owed = (time.monotonic() - began) * share

    def _read_unit(self, job: Job) -> int:
        """Read a unit of a job; what is read goes on to the batch, or the job is done."""
        try:
            size = job.read()
            if size is not None:
                self.tokens_read += size
                self._reading.append(job)
                return size
            if isinstance(job, GenerateJob) and not job.has_ended:
                self._join(job)
        except Exception as problem:
            job.fail(problem)
        return 1

    def _join(self, job: GenerateJob) -> None:
        if job.sampling.max_tokens:
            self.batch.join(job)
            return
        job.end_of_length()
        job.deliver()
        if job.has_to_read:
            self._reading.append(job)

    def _continue(self) -> None:
        if not self.batch.jobs:
            self._owed = 0.0
            return
        began = time.monotonic()
        self._reading.extend(job for job in self.batch.step() if job.has_to_read)
        self._owed -= time.monotonic() - began


def _has_ended(job: Job) -> bool:
    return isinstance(job, GenerateJob) and job.has_ended
