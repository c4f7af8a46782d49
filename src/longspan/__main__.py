"""The entry point: `longspan`, and `python -m longspan`.

The imports of the command line take a moment. An interrupt in that time ends the program with one line, and
so does a lack of memory.
"""

import atexit
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from longspan import compiling
from longspan.errors import is_out_of_memory

COMPILING = ("train", "search", "bench")


def main() -> int:
    compiling.possible = any(word in COMPILING for word in sys.argv[1:])
    previous = signal.signal(signal.SIGINT, _leave)
    try:
        from longspan.cli import main as run
    except (ImportError, MemoryError, OSError) as problem:
        if not is_out_of_memory(problem):
            raise
        os.write(2, b"longspan: there is not enough memory to start: raise the limit of 'ulimit -v'\n")
        return 1
    signal.signal(signal.SIGINT, previous)  # from here on `run` handles it
    status = run()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end(status)
    return status


def _end(status: int) -> NoReturn:
    """End a process of torchrun at once: torch's threads may abort it while the interpreter shuts down."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"longspan: stopped\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
