"""constraints.lock has the versions of constraints.txt, each with the hashes of its files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def versions(file: str) -> set[str]:
    found = re.findall(r"^([\w.-]+==[\w.]+)", (ROOT / file).read_text(), flags=re.MULTILINE)
    return {version.lower().replace("_", "-") for version in found}


def test_the_lock_is_up_to_date() -> None:
    """torch has no hash: the build for CPUs is another file than the one for GPUs."""
    torch = {version for version in versions("constraints.txt") if version.startswith("torch==")}
    assert len(torch) == 1
    assert versions("constraints.lock") == versions("constraints.txt") - torch, "run 'make lock'"


def test_every_version_has_hashes_and_no_index_is_named() -> None:
    text = (ROOT / "constraints.lock").read_text()
    entry = r"^[\w.-]+==[\w.]+(?: \\\n    --hash=sha256:[0-9a-f]{64})+$"
    assert len(re.findall(entry, text, flags=re.MULTILINE)) == len(versions("constraints.lock"))
    assert not re.search(r"index-url|find-links|https?:|file:", text)
