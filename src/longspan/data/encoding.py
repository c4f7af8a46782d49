"""What encodes a split: a tokenizer in this process, or several processes that have it too.

This process reads the text and cuts it, as it would alone. The others encode the parts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from longspan.data.token_file import Encoder
from longspan.data.tokenizers import Tokenizer, id_type
from longspan.data.tokenizers.interface import Ids, TextTokenizer
from longspan.data.workers import Workers, processes_for
from longspan.data.workers.tasks import UTF_8


@contextmanager
def encoder(tokenizer: Tokenizer, num_bytes: int) -> Iterator[Encoder]:
    """An encoder for a text of so many bytes.

    Bytes and characters are encoded as fast as they are read, and tokenizers of plugins may be unknown to a
    new process: they always run in this process.
    """
    processes = processes_for(num_bytes)
    own = type(tokenizer).__module__.startswith("longspan.")
    if processes == 1 or not own or not isinstance(tokenizer, TextTokenizer):
        yield tokenizer
        return
    with tempfile.TemporaryDirectory(prefix="longspan-") as folder:
        tokenizer.save(Path(folder))
        with Workers("encode", processes, folder=folder) as workers:
            yield _Encoders(tokenizer, workers)


class _Encoders:
    def __init__(self, tokenizer: TextTokenizer, workers: Workers) -> None:
        self.vocabulary_size = tokenizer.vocabulary_size
        self._tokenizer, self._workers = tokenizer, workers

    def encode_split(self, chunks: Iterable[bytes]) -> Iterator[Ids]:
        texts = (text.encode(*UTF_8) for text in self._tokenizer.texts(chunks))
        dtype = id_type(self.vocabulary_size)
        return (np.frombuffer(ids, dtype=dtype) for ids in self._workers.map(texts))
