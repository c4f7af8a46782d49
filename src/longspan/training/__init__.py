"""Training: from a configuration to a run folder."""

from longspan.training.errors import Diverged, Interrupted, Stopped
from longspan.training.finished import is_finished
from longspan.training.reporter import PlainReporter, Reporter, reporter_for, reporter_for_stdout
from longspan.training.run import resume, train
from longspan.training.strategy import Strategy

__all__ = [
    "Diverged",
    "Interrupted",
    "PlainReporter",
    "Reporter",
    "Stopped",
    "Strategy",
    "is_finished",
    "reporter_for",
    "reporter_for_stdout",
    "resume",
    "train",
]
