"""The home folder in paths, and the cache folder for corpora, token files and compiled code."""

from __future__ import annotations

import os
from pathlib import Path

import pooch


def home() -> Path:
    """The folder in `LONGSPAN_HOME`, else Longspan's folder in the user's cache."""
    return expanded(os.environ.get("LONGSPAN_HOME") or pooch.os_cache("longspan")).absolute()


def expanded(path: str | os.PathLike[str]) -> Path:
    """`~` and `~user` replaced by their folders; one of an unknown user stays as it is."""
    return Path(os.path.expanduser(path))
