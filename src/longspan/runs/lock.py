"""A lock, so that only one process trains a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from longspan import distributed
from longspan.errors import UserError
from longspan.runs.folder import RunFolder
from longspan.runs.no_links import open_to_append, refuse_links

if sys.platform != "win32":
    import fcntl


@contextmanager
def for_training(run: RunFolder) -> Iterator[None]:
    """Keep other processes from training `run`. The system releases the lock when the process ends.

    The lock is on the metrics file: it exists during all of the training and is never replaced.
    """
    refuse_links(run)
    if not distributed.is_first():  # rank 0 has it for all
        yield
        return
    with open_to_append(run.metrics) as file:
        if sys.platform != "win32":
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{run.path} is being trained by another process: wait for it, or stop it"
                ) from None
            except OSError:
                pass  # some network file systems have no locks: train without
        yield
