"""The Python interface: `longspan.train`, `longspan.resume` and `longspan.evaluate`.

Each does what the command of the same name does, quietly, and returns what it found.
"""

from longspan.api.evaluation import evaluate
from longspan.api.run import Run
from longspan.api.training import resume, train

__all__ = ["Run", "evaluate", "resume", "train"]
