"""Training: from a configuration to a run folder."""

from longspan.training.errors import Diverged, Interrupted
from longspan.training.method import Method
from longspan.training.reporter import PlainReporter, Reporter, reporter_for_stdout
from longspan.training.run import is_finished, resume, train

__all__ = [
    "Diverged",
    "Interrupted",
    "Method",
    "PlainReporter",
    "Reporter",
    "is_finished",
    "reporter_for_stdout",
    "resume",
    "train",
]
