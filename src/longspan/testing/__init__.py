"""Tests for models of one's own: `check_model` holds a model to the interface of `longspan.models.interface`.

Training, evaluation, generation and serving rely on these rules and on nothing else. Neither pytest nor
hypothesis is needed.
"""

from longspan.testing.check import RULES, ContractError, check_model

__all__ = ["RULES", "ContractError", "check_model"]
