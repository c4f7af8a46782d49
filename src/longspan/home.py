"""Where corpora, token files and compiled code live between runs."""

from __future__ import annotations

import os
from pathlib import Path

import pooch


def home() -> Path:
    """The folder named by `LONGSPAN_HOME`, else this user's cache folder for Longspan."""
    return Path(os.environ.get("LONGSPAN_HOME") or pooch.os_cache("longspan")).absolute()
