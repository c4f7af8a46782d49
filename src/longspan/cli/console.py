"""What commands say while they work; what they found goes to standard output."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """One line for the person who waits."""
    print(line, file=sys.stderr)
