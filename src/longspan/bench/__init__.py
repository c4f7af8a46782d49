"""Training and decoding speed of a model on this machine, compared with the machine's limits."""

from longspan.bench.figures import Figures
from longspan.bench.measure import Bench

__all__ = ["Bench", "Figures"]
