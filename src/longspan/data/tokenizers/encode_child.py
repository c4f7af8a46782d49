"""The program of a process that encodes: texts on standard input, token ids on standard output.

Its argument is the folder of a saved tokenizer. A text is eight bytes with its size, then UTF-8. An answer is
a byte, eight bytes with a size, and so many bytes: after `0` the ids, after `1` the message of a `UserError`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import sys
from pathlib import Path

SIZE = struct.Struct("<Q")
ERRORS = "surrogatepass"  # bytes that are not UTF-8 are lone surrogates


def main(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends this process
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux: also if the parent is killed
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer

    import numpy as np

    from longspan.data.tokenizers import id_type, load_tokenizer
    from longspan.data.tokenizers.interface import TextTokenizer
    from longspan.errors import UserError

    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, TextTokenizer)
    dtype = id_type(tokenizer.vocabulary_size)
    while header := sys.stdin.buffer.read(SIZE.size):
        text = sys.stdin.buffer.read(*SIZE.unpack(header)).decode("utf-8", ERRORS)
        try:
            status, answer = b"0", np.ascontiguousarray(tokenizer.encode_text(text), dtype=dtype).tobytes()
        except UserError as problem:
            status, answer = b"1", str(problem).encode("utf-8", ERRORS)
        out.write(status + SIZE.pack(len(answer)))
        out.write(answer)
        out.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
