"""Commands under torchrun: which of them may run in several processes, and errors that are printed once.

torch is imported only if torchrun, or a launcher that sets the same variables, started this process.
"""

from __future__ import annotations

import os
import sys
import time

from longspan.errors import UsageError, UserError
from longspan.streams import output_may_go_away

DIVIDED = ("train", "search", "eval")
"""The commands that divide their work over the processes of torchrun."""

_WAIT_SECONDS = 2.0


def rank() -> int:
    """The number of this process among those of torchrun; 0 without it. They may not be connected yet."""
    return int(os.environ["RANK"]) if _launched() else 0


def several() -> bool:
    """Whether torchrun started more than one process."""
    return _launched() and int(os.environ["WORLD_SIZE"]) > 1


def check_command(name: str) -> None:
    """Raise `UsageError` if several processes run a command that does not divide its work."""
    if name not in DIVIDED and several():
        raise UsageError(f"longspan {name} runs in one process: start it without torchrun")


def complain(line: str) -> None:
    """One line on stderr, and the same in torchrun's report."""
    if rank():
        line = f"rank {rank()}: {line}"
    try:
        raise UserError(line) from None
    except UserError as problem:
        problem.__traceback__ = None  # the report shows it
        record(problem)
    wait_for_first()
    with output_may_go_away():
        print(f"longspan: {line}", file=sys.stderr)


def wait_for_first() -> None:
    """Let rank 0 end first: then torchrun ends the others, which would print the same line again."""
    if rank():
        time.sleep(_WAIT_SECONDS)


def record(problem: Exception) -> None:
    """Keep the exception that is being handled for the report that torchrun prints at its end."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(problem)


def _launched() -> bool:
    if "LOCAL_RANK" not in os.environ:
        return False
    from longspan.distributed import launched

    return launched()
