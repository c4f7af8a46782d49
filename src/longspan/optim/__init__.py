"""Optimizers and learning-rate schedules: what torch lacks is here, the rest is torch's."""

from longspan.optim.adagrad import Adagrad
from longspan.optim.build import build_optimizers, compile_updates, set_rate
from longspan.optim.groups import undeclared_notice
from longspan.optim.lamb import Lamb
from longspan.optim.memory import memories, restore_memories
from longspan.optim.muon import Muon
from longspan.optim.schedules import done, fraction

__all__ = [
    "Adagrad",
    "Lamb",
    "Muon",
    "build_optimizers",
    "compile_updates",
    "done",
    "fraction",
    "memories",
    "restore_memories",
    "set_rate",
    "undeclared_notice",
]
