"""Evaluation on held-out text: every token once, and the originals' protocols by name."""

from longspan.evaluation.context_curve import ContextCurve, ContextPoint, context_curve
from longspan.evaluation.dynamic import DynamicScore, dynamic_evaluation
from longspan.evaluation.evaluate import evaluate
from longspan.evaluation.held_out import check_split, has_changed, held_out, split_to_score
from longspan.evaluation.score import Score

__all__ = [
    "ContextCurve",
    "ContextPoint",
    "DynamicScore",
    "Score",
    "check_split",
    "context_curve",
    "dynamic_evaluation",
    "evaluate",
    "has_changed",
    "held_out",
    "split_to_score",
]
