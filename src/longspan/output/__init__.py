"""Output layers: from hidden states to probabilities of the next token."""

from longspan.output.adaptive_softmax import AdaptiveSoftmaxHead
from longspan.output.interface import OutputHead
from longspan.output.softmax import SoftmaxHead
from longspan.output.split_softmax import SplitSoftmaxHead

__all__ = ["AdaptiveSoftmaxHead", "OutputHead", "SoftmaxHead", "SplitSoftmaxHead"]
