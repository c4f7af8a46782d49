"""A server in a process of its own, on a free port of this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longspan.training import train
from tests.training.runs import small_config, write_text

SECONDS = 90  # the machine may be busy
PROMPT = "the cat sat on a mat\n"


def trained_run(folder: Path) -> Path:
    """A small model that has learned to write some words."""
    config = small_config(write_text(folder), stage__0__steps=60, training__sample_tokens=30)
    return train(config, folder / "small").path


@contextmanager
def serving(*words: object, key: str = "") -> Iterator[str]:
    """The address of `longspan serve` with these words."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "LONGSPAN_API_KEY": key}
    if not key:
        del environment["LONGSPAN_API_KEY"]
    command = [sys.executable, "-m", "longspan", "serve", *map(str, words), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        yield _address(process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        line = process.stdout.readline()
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found[0] + "/"
        if not line:
            break
    raise AssertionError(f"the server did not start, status {process.poll()}")
