"""The entry point: `longspan`, and `python -m longspan`.

The imports of the command line take a moment. An interrupt in that time ends the program with one line, and
so does a lack of memory.
"""

import os
import signal
import sys
from types import FrameType

from longspan.errors import is_out_of_memory


def main() -> int:
    previous = signal.signal(signal.SIGINT, _leave)
    try:
        from longspan.cli import main as run
    except (ImportError, MemoryError, OSError) as problem:
        if not is_out_of_memory(problem):
            raise
        os.write(2, b"longspan: there is not enough memory to start: raise the limit of 'ulimit -v'\n")
        return 1
    signal.signal(signal.SIGINT, previous)  # from here on `run` handles it
    return run()


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"longspan: stopped\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
