"""`check_model`: every rule in turn, and which one a model breaks."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from longspan.errors import UserError, nearest
from longspan.layers.block import Block
from longspan.models.interface import LanguageModel
from longspan.testing import learning, reading, weights
from longspan.testing.probe import Broken, Probe
from longspan.testing.rule import Rule

RULES: dict[str, Rule] = {rule.name: rule for module in (reading, weights, learning) for rule in module.RULES}


class ContractError(AssertionError):
    """A model breaks a rule of the interface; `rule` is its name."""

    def __init__(self, rule: Rule, seen: str) -> None:
        super().__init__(
            f"rule '{rule.name}' is broken: {seen}. The rule: {rule.rule}. Look at {rule.look_at}."
        )
        self.rule = rule.name


def check_model(model: nn.Module, rules: Iterable[str] | None = None) -> None:
    """Hold `model` to the rules, or to some of them by name (`RULES` has them all).

    The first rule that is broken raises a `ContractError`, which says what was seen and what to look at. The
    model itself is not changed. In float64 (`model.double()`) differences are told from rounding best.
    """
    if not isinstance(model, LanguageModel):
        advice = ": put the block into a longspan.Stack" if isinstance(model, Block) else ""
        raise TypeError(f"check_model needs a longspan.LanguageModel, not {type(model).__name__}{advice}")
    for name in RULES if rules is None else rules:
        if name not in RULES:
            raise ValueError(f"there is no rule '{name}'{nearest(name, RULES)}")
        rule = RULES[name]
        try:
            rule.check(Probe(model))
        except Broken as problem:
            raise ContractError(rule, str(problem)) from None
        except UserError:  # it says what to do
            raise
        except Exception as problem:
            raise ContractError(rule, f"the model raised {type(problem).__name__}: {problem}") from problem
