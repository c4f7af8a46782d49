"""A rule of the interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from longspan.testing.probe import Probe


@dataclass(frozen=True)
class Rule:
    """What must hold, how it is checked, and where the mistake is where it does not."""

    name: str
    rule: str
    look_at: str
    check: Callable[[Probe], None]
