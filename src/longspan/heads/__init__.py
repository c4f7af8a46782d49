"""Output layers: hidden states in, probabilities of the next token out."""

from longspan.heads.interface import Head
from longspan.heads.softmax import SoftmaxHead

__all__ = ["Head", "SoftmaxHead"]
