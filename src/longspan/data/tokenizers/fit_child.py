"""The program that learns a vocabulary: texts on standard input, the model on standard output.

It is run as a file, in a process of its own, and imports nothing of longspan: it starts in a fraction of a
second. The first line of the input is JSON: which library, and its settings. Every text follows after its
length in bytes, four bytes. The output is `0` and the model, or `1` and an error message.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import signal
import struct
import sys
from collections.abc import Iterator
from typing import Any


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends this process
    _die_with_parent()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not the model
    settings = json.loads(sys.stdin.buffer.readline())
    learn = {"sentencepiece": learn_sentencepiece, "bpe": learn_bpe}[settings.pop("library")]
    try:
        answer = b"0" + learn(_texts(), settings)
    except Exception as problem:
        answer = b"1" + str(problem).encode("utf-8", "replace")
    out.write(answer)
    out.close()


def learn_sentencepiece(texts: Iterator[str], settings: dict[str, Any]) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=texts, model_writer=model, **settings)
    return model.getvalue()


def learn_bpe(texts: Iterator[str], settings: dict[str, Any]) -> bytes:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, **settings
    )
    model.train_from_iterator(texts, trainer)
    return str(model.to_str()).encode()


def _texts() -> Iterator[str]:
    while header := sys.stdin.buffer.read(4):
        (size,) = struct.unpack("<I", header)
        yield sys.stdin.buffer.read(size).decode()


def _die_with_parent() -> None:
    """Linux ends this process if its parent is killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    main()
