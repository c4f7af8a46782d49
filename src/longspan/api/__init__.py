"""The Python interface: `longspan.train`, `longspan.resume`, `longspan.evaluate` and its other forms.

Each does what the command does, quietly, and returns what it found.
"""

from longspan.api.evaluation import evaluate
from longspan.api.evaluation_forms import context_curve, dynamic_evaluation
from longspan.api.run import Run
from longspan.api.training import resume, train

__all__ = ["Run", "context_curve", "dynamic_evaluation", "evaluate", "resume", "train"]
