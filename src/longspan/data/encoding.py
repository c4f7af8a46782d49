"""Encoding a split with several processes.

This process reads the text and cuts it, as it would alone. The others encode the parts, and their ids are
taken in order. So the result does not depend on the number of processes.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from longspan.cores import usable_cores
from longspan.data.corpus import CHUNK_BYTES
from longspan.data.token_file import Encoder
from longspan.data.tokenizers import Tokenizer, encode_child, id_type
from longspan.data.tokenizers.encode_child import ERRORS, SIZE
from longspan.data.tokenizers.interface import Ids, TextTokenizer
from longspan.errors import UserError

_LEAST_CHUNKS = 2  # for each process: to start one for less does not pay


@contextmanager
def encoder(tokenizer: Tokenizer, num_bytes: int, processes: int | None) -> Iterator[Encoder]:
    """What encodes a text of so many bytes: the tokenizer itself, or `processes` others that have it too.

    By default there is one process for each usable core, and none for a small text. Bytes and characters are
    encoded as fast as they are read, and tokenizers of plugins may be unknown to a new process: they always
    run in this process.
    """
    if processes is None:
        processes = min(usable_cores(), num_bytes // (_LEAST_CHUNKS * CHUNK_BYTES))
    own = type(tokenizer).__module__.startswith("longspan.")
    if processes < 2 or not own or not isinstance(tokenizer, TextTokenizer):
        yield tokenizer
        return
    with tempfile.TemporaryDirectory(prefix="longspan-") as folder:
        tokenizer.save(Path(folder))
        encoders = _Encoders(tokenizer, Path(folder), processes)
        try:
            yield encoders
        finally:
            encoders.close()


class _Encoders:
    """Processes with a tokenizer, and a thread for each that waits for it."""

    def __init__(self, tokenizer: TextTokenizer, folder: Path, processes: int) -> None:
        self.vocabulary_size = tokenizer.vocabulary_size
        self._tokenizer = tokenizer
        self._most_pending = processes + 2
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="encode")
        self._children = [_Child(folder, tokenizer.vocabulary_size) for _ in range(processes)]
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        for child in self._children:
            self._idle.put(child)

    def encode_split(self, chunks: Iterable[bytes]) -> Iterator[Ids]:
        pending: deque[Future[Ids]] = deque()
        for text in self._tokenizer.texts(chunks):
            pending.append(self._threads.submit(self._encode, text))
            if len(pending) >= self._most_pending:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def close(self) -> None:
        """End all processes at once."""
        for child in self._children:
            child.kill()
        self._threads.shutdown(cancel_futures=True)
        for child in self._children:
            child.close()

    def _encode(self, text: str) -> Ids:
        child = self._idle.get()
        try:
            return child.encode(text)
        finally:
            self._idle.put(child)


class _Child:
    """A process that runs `encode_child`."""

    def __init__(self, folder: Path, vocabulary_size: int) -> None:
        environment = {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONSAFEPATH": "1",
            "TOKENIZERS_PARALLELISM": "false",  # one thread in each process
            "OMP_NUM_THREADS": "1",
        }
        self._dtype = id_type(vocabulary_size)
        self._process = subprocess.Popen(
            [sys.executable, encode_child.__file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | environment,
        )

    def encode(self, text: str) -> Ids:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        data = text.encode("utf-8", ERRORS)
        with suppress(BrokenPipeError):  # it has ended: there is no answer
            self._process.stdin.write(SIZE.pack(len(data)))
            self._process.stdin.write(data)
            self._process.stdin.flush()
        header = self._process.stdout.read(1 + SIZE.size)
        size = SIZE.unpack(header[1:])[0] if len(header) > SIZE.size else 0
        answer = self._process.stdout.read(size)
        if not header or len(answer) < size:
            raise UserError(
                "a process that encodes text was stopped: it probably needs more memory; use fewer processes "
                "with data.processes"
            )
        if header[:1] != b"0":
            raise UserError(answer.decode("utf-8", ERRORS))
        return np.frombuffer(answer, dtype=self._dtype)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
