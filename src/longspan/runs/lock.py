"""One process at a time trains a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from longspan.errors import UserError
from longspan.runs.folder import RunFolder

if sys.platform != "win32":
    import fcntl


@contextmanager
def for_training(run: RunFolder) -> Iterator[None]:
    """Keep other processes from training `run`; the system lets go of it however this one ends.

    What is locked is the metrics file: it is always there while a run is trained, and nothing replaces it.
    """
    with run.metrics.open("ab") as file:
        if sys.platform != "win32":
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{run.path} is being trained by another process") from None
            except OSError:
                pass  # some network file systems have no locks: better to train without than not at all
        yield
