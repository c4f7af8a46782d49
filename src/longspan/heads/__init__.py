"""Output layers: hidden states in, probabilities of the next token out."""

from longspan.heads.adaptive_softmax import AdaptiveSoftmaxHead
from longspan.heads.interface import Head
from longspan.heads.softmax import SoftmaxHead
from longspan.heads.split_softmax import SplitSoftmaxHead

__all__ = ["AdaptiveSoftmaxHead", "Head", "SoftmaxHead", "SplitSoftmaxHead"]
