"""Exceptions that end a training early."""

from __future__ import annotations

import signal

from longspan.errors import UserError


class Diverged(UserError):
    """A loss, a weight or a score is not finite."""


class Stopped(Exception):
    """The callback asked to stop; everything is saved."""


class Interrupted(Exception):
    """A signal asked to stop; everything is saved."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.exit_status = 128 + signal_number
