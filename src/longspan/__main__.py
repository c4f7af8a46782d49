"""The entry point: `longspan`, and `python -m longspan`.

The imports of the command line take a moment. An interrupt in that time ends the program with one line.
"""

import os
import signal
import sys
from types import FrameType


def main() -> int:
    previous = signal.signal(signal.SIGINT, _leave)
    from longspan.cli import main as run

    signal.signal(signal.SIGINT, previous)  # from here on `run` handles it
    return run()


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"longspan: stopped\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
