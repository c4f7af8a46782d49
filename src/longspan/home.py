"""The cache folder for corpora, token files and compiled code."""

from __future__ import annotations

import os
from pathlib import Path

import pooch


def home() -> Path:
    """The folder in `LONGSPAN_HOME`, else Longspan's folder in the user's cache."""
    return Path(os.environ.get("LONGSPAN_HOME") or pooch.os_cache("longspan")).expanduser().absolute()
