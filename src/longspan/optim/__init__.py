"""Learning-rate schedules and the optimizers that torch does not have.

The optimizers are plain torch optimizers: they take parameters or groups, a closure, and torch's schedulers.

| optimizer | meaning |
|---|---|
| `Adagrad(parameters, lr, clip=0.0)` | Adagrad whose step is clipped by the norm of each tensor's gradient |
| `Lamb(parameters, lr, betas=(0.9, 0.999), weight_decay=0.0, min_trust=0.25)` | LAMB as used for SHA-RNN |
| `Muon(parameters, lr, momentum=0.95, weight_decay=0.0, cautious=False)` | Muon; only for matrices |
| `NorMuon(parameters, lr, ..., beta2=0.95)` | Muon whose neurons take steps of one size; only for matrices |

The other names build and restore the optimizers of a run.
"""

from longspan.optim.adagrad import Adagrad
from longspan.optim.build import build_optimizers, compile_updates, set_momentum, set_rate
from longspan.optim.groups import undeclared_notice
from longspan.optim.lamb import Lamb
from longspan.optim.memory import memories, restore_memories, state_bytes
from longspan.optim.muon import Muon
from longspan.optim.normuon import NorMuon
from longspan.optim.schedules import done, fraction, momentum, multi_token_weights

__all__ = [
    "Adagrad",
    "Lamb",
    "Muon",
    "NorMuon",
    "build_optimizers",
    "compile_updates",
    "done",
    "fraction",
    "memories",
    "momentum",
    "multi_token_weights",
    "restore_memories",
    "set_momentum",
    "set_rate",
    "state_bytes",
    "undeclared_notice",
]
