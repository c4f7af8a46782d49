"""How fast this machine trains and decodes a model, next to what the same machine could do."""

from longspan.bench.figures import Figures
from longspan.bench.measure import Bench

__all__ = ["Bench", "Figures"]
