"""The program of a worker process: requests on standard input, answers on standard output.

Its arguments are a task and the settings of the task as JSON. A request is eight bytes with its size, and so
many bytes. An answer begins with a byte more: see `answer`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import struct
import sys
from collections.abc import Callable

SIZE = struct.Struct("<Q")
DONE, USER_ERROR, OS_ERROR, ERROR = b"0", b"1", b"2", b"3"


def main(task: str, settings: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends this process
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # Linux: also if the parent is killed
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer

    from longspan.data.workers.tasks import TASKS

    work = TASKS[task](**json.loads(settings))
    while header := sys.stdin.buffer.read(SIZE.size):
        status, data = answer(work, sys.stdin.buffer.read(*SIZE.unpack(header)))
        out.write(status + SIZE.pack(len(data)))
        out.write(data)
        out.flush()


def answer(work: Callable[[bytes], bytes], request: bytes) -> tuple[bytes, bytes]:
    """The result, or an exception: its message, or what an `OSError` is made of."""
    from longspan.errors import UserError

    try:
        return DONE, work(request)
    except UserError as problem:
        return USER_ERROR, json.dumps(str(problem)).encode()
    except OSError as problem:
        return OS_ERROR, json.dumps([problem.errno, problem.strerror, problem.filename], default=str).encode()
    except Exception as problem:
        return ERROR, json.dumps(f"{type(problem).__name__}: {problem}").encode()


if __name__ == "__main__":
    main(*sys.argv[1:])
