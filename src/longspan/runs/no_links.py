"""Writing to a run folder never leaves it: a run folder may come from elsewhere, with links in it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from longspan.errors import UserError
from longspan.runs.folder import RunFolder


def refuse_links(run: RunFolder) -> None:
    """Raise `UserError` if a file or folder that a training writes to is a link.

    Checkpoints and pictures are not listed: they are replaced, which does not follow a link.
    """
    written = [*run.path.glob("*.jsonl"), run.checkpoint("last").parent, run.tensorboard]
    for path in [*written, *run.tensorboard.glob("*")]:
        if path.is_symlink():
            raise _refusal(path)


def open_to_append(path: Path) -> BinaryIO:
    """Open a file of a run for appending; it is created if it does not exist, and must not be a link."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as problem:
        if problem.errno == errno.ELOOP:
            raise _refusal(path) from None
        raise
    file = os.fdopen(descriptor, "ab")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise UserError(f"{path} is not a regular file: remove it")
    return file


def _refusal(path: Path) -> UserError:
    return UserError(
        f"{path} is a link, and a run is not written through links: replace it by what it links to"
    )
