"""Processes that do a part of the work of preparing a text.

Results are taken in the order of the requests, so nothing depends on the number of processes. They end with
the block that started them, with Ctrl-C, and if this process is killed.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from longspan.cores import usable_cores
from longspan.data.corpus import CHUNK_BYTES
from longspan.data.workers import child
from longspan.data.workers.child import DONE, OS_ERROR, SIZE, USER_ERROR
from longspan.errors import UserError

_LEAST_BYTES = 2 * CHUNK_BYTES  # of text for each process: to start one for less does not pay

_wanted: ContextVar[int | None] = ContextVar("processes", default=None)


@contextmanager
def use_processes(number: int | None) -> Iterator[None]:
    """Inside, `processes_for` is this number; None: it depends on the text and the usable cores."""
    before = _wanted.set(number)
    try:
        yield
    finally:
        _wanted.reset(before)


def processes_for(num_bytes: int) -> int:
    """How many processes should work on a text: 1 is this process, and no others."""
    wanted = _wanted.get()
    return max(1, min(usable_cores(), num_bytes // _LEAST_BYTES)) if wanted is None else wanted


class Workers:
    """Processes with one task, and a thread for each that waits for it."""

    def __init__(self, task: str, processes: int, **settings: Any) -> None:
        self._most_pending = processes + 2
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix=task)
        self._children = [_Child(task, settings) for _ in range(processes)]
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        for process in self._children:
            self._idle.put(process)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *problem: object) -> None:
        """End all processes at once."""
        for process in self._children:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._children:
            process.close()

    def map(self, requests: Iterable[bytes]) -> Iterator[bytes]:
        """The answers, in order; only a few requests are read ahead."""
        pending: deque[Future[bytes]] = deque()
        for request in requests:
            pending.append(self._threads.submit(self._answer, request))
            if len(pending) >= self._most_pending:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _answer(self, request: bytes) -> bytes:
        process = self._idle.get()
        try:
            return process.answer(request)
        finally:
            self._idle.put(process)


class _Child:
    """A process that runs `child.py`."""

    def __init__(self, task: str, settings: dict[str, Any]) -> None:
        environment = {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONSAFEPATH": "1",
            "TOKENIZERS_PARALLELISM": "false",  # one thread in each process
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, child.__file__, task, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | environment,
        )

    def answer(self, request: bytes) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended: there is no answer
            self._process.stdin.write(SIZE.pack(len(request)))
            self._process.stdin.write(request)
            self._process.stdin.flush()
        header = self._process.stdout.read(1 + SIZE.size)
        size = SIZE.unpack(header[1:])[0] if len(header) > SIZE.size else 0
        data = self._process.stdout.read(size)
        if not header or len(data) < size:
            raise UserError(
                "a process that prepares text was stopped: it probably needs more memory; use fewer "
                "processes with data.processes"
            )
        if header[:1] == DONE:
            return data
        problem = json.loads(data)
        if header[:1] == OS_ERROR:
            raise OSError(*problem)
        raise UserError(problem) if header[:1] == USER_ERROR else RuntimeError(problem)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
