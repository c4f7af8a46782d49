"""Learning a vocabulary with a library: on a part of a large text, and in a process that can be stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from longspan.config import TokenizerConfig
from longspan.data.corpus import Corpus
from longspan.data.text import decoded, readable, whole_lines
from longspan.errors import UserError

FIT_BYTES = 32 << 20  # of longer texts every n-th line is used
# Text without blanks, such as DNA, is one word, for which libraries need minutes: it is cut into short parts.
_LONG_WORD = re.compile(r"\S{2001,}")
_CUT = 64
_SOURCE = re.compile(r"^.*\.cc\(\d+\) \[.*\] ?")  # the C++ source location in an error message
_CHILD = Path(__file__).with_name("fit_child.py")


def fit_texts(config: TokenizerConfig, corpus: Corpus, long_words: int | None = None) -> Iterator[str]:
    """The text of the train split, with very long words cut; about `long_words` bytes of them are kept."""
    every = 1 + corpus.size("train") // long_words if long_words and config.fit_bytes != 0 else 1
    texts = whole_lines(decoded(corpus.read("train"), lowercase=config.lowercase))
    for text in map(readable, texts):
        end = 0
        for word in _LONG_WORD.finditer(text):
            yield text[end : word.start()]
            for start in range(word.start(), word.end(), _CUT * every):
                yield text[start : min(start + _CUT, word.end())]
            end = word.end()
        yield text[end:]


def every_nth(config: TokenizerConfig, corpus: Corpus) -> int:
    """Every n-th line of the train split is used; 1: all of them."""
    wanted = FIT_BYTES if config.fit_bytes is None else config.fit_bytes
    return 1 + corpus.size("train") // wanted if wanted else 1


def learn(library: str, corpus: Corpus, texts: Iterable[str], settings: dict[str, Any]) -> bytes:
    """The model that a library learns, in a child process: Ctrl-C ends it at once."""
    environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONSAFEPATH": "1"}
    child = subprocess.Popen(
        [sys.executable, str(_CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | environment,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with contextlib.suppress(BrokenPipeError):  # it has failed already: its answer says why
            child.stdin.write(json.dumps({"library": library, **settings}).encode() + b"\n")
            for text in texts:
                data = text.encode()
                child.stdin.write(struct.pack("<I", len(data)) + data)
            child.stdin.close()
        answer = child.stdout.read()
        status = child.wait()
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    if status == -signal.SIGKILL:
        raise UserError("learning the vocabulary was stopped by the system: it probably needs more memory")
    if status or answer[:1] != b"0":
        said = _SOURCE.sub("", " ".join(answer[1:].decode().split()))
        raise UserError(
            f"{library} could not learn {settings['vocab_size']} pieces from {corpus.name}: "
            f"{said or 'no reason given'}"
        )
    return answer[1:]
